#include "muster/group/p2p/outgoing.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace muster {
namespace {

/// Of a long message: between two pieces other messages have their turn.
constexpr size_t kPieceBytes = size_t{512} << 10;

size_t cost(const MessageOperation& operation) { return operation.data.bytes() + kMessageHeaderBytes; }

bool is_short(const MessageOperation& operation) { return operation.data.bytes() <= kEagerBytes; }

}  // namespace

void OutgoingMessages::send(const MessagePtr& operation) {
  if (waiting_.size() + offered_.size() >= kMaxRequests) {
    return delegate_.finish(
        operation,
        fail(ErrorCode::kResourceExhausted,
             fmt::format("{} messages to rank {} wait to be received; wait for some", kMaxRequests, peer()), peer()));
  }
  if (is_open()) return launch(operation);
  waiting_.push(operation);
  if (!is_short(*operation) || window_ < cost(*operation)) return;
  window_ -= cost(*operation);
  operation->copied = true;
  operation->copy.resize(operation->data.bytes());
  operation->data.read(0, operation->copy.data(), operation->copy.size());
  ++copies_;
  delegate_.copied(1);
  delegate_.finish(operation, {});
}

void OutgoingMessages::drop_copies() { delegate_.copied(-std::exchange(copies_, 0)); }

void OutgoingMessages::abandon(const Error& why) {
  drop_copies();
  close(why);
  waiting_ = {};
  accepted_ = {};
  offered_.clear();
}

void OutgoingMessages::open(std::unique_ptr<Link> link) {
  begin(std::move(link));
  while (!waiting_.empty() && is_open()) launch(waiting_.pop());
}

void OutgoingMessages::launch(const MessagePtr& operation) {
  if (operation->copied) return launch_eager(operation);  // paid for
  if (is_short(*operation) && window_ >= cost(*operation)) {
    window_ -= cost(*operation);
    return launch_eager(operation);
  }
  operation->id = ++last_id_;
  offered_.emplace(operation->id, operation);
  write({MessageKind::kOffer, operation->tag, operation->id, operation->data.bytes(), 0, operation->data.dtype()});
}

void OutgoingMessages::launch_eager(const MessagePtr& operation) {
  const size_t bytes = operation->data.bytes();
  const MessageHeader header{MessageKind::kEager, operation->tag, 0, bytes, 0, operation->data.dtype()};
  if (operation->copied) {
    const ConstSegment payload{operation->copy.data(), bytes};
    return write(header, {&payload, 1}, [this, operation] {
      if (copies_ == 0) return;
      --copies_;
      delegate_.copied(-1);
    });
  }
  write(header, segments_of<ConstSegment>(operation->data, 0, bytes),
        [this, operation] { delegate_.finish(operation, {}); });
}

void OutgoingMessages::handle(const MessageHeader& header) {
  const auto found = offered_.find(header.id);
  if (found == offered_.end() || header.kind < MessageKind::kAccept) {
    return reject("it answers a message that was not offered");
  }
  const MessagePtr operation = found->second;
  if (operation->matched) return reject("it answers a message twice");
  if (header.credit > kEagerWindow - window_) return reject("it gives back more than it got");
  window_ += header.credit;
  header.kind == MessageKind::kAccept ? accepted(operation) : refused(operation, header);
  read_header();
}

void OutgoingMessages::accepted(const MessagePtr& operation) {
  if (operation->data.bytes() == 0) {
    offered_.erase(operation->id);
    return delegate_.finish(operation, {});
  }
  operation->matched = true;
  accepted_.push(operation);
  if (accepted_.size() == 1) stream();
}

void OutgoingMessages::refused(const MessagePtr& operation, const MessageHeader& wanted) {
  offered_.erase(operation->id);
  const Dtype dtype = operation->data.dtype();
  const std::string what =
      wanted.bytes == operation->data.bytes()
          ? fmt::format("the message is {}, rank {} receives {}", name(dtype), peer(), name(wanted.dtype))
          : fmt::format("the message has {} bytes, rank {} receives {}", operation->data.bytes(), peer(), wanted.bytes);
  delegate_.finish(operation, fail(ErrorCode::kMismatch, fmt::format("{} with tag {}", what, operation->tag), peer()));
}

/// Sends the next piece of the first message that was accepted. One at a time is under way.
void OutgoingMessages::stream() {
  const MessagePtr& operation = accepted_.front();
  const size_t bytes = std::min(kPieceBytes, operation->data.bytes() - operation->moved);
  const auto payload = segments_of<ConstSegment>(operation->data, operation->moved, bytes);
  write({MessageKind::kData, 0, operation->id, bytes, 0}, payload, [this, bytes] {
    const MessagePtr current = accepted_.front();
    current->moved += bytes;
    if (current->moved == current->data.bytes()) {
      accepted_.pop();
      offered_.erase(current->id);
      delegate_.finish(current, {});
    }
    if (!accepted_.empty()) stream();
  });
}

}  // namespace muster
