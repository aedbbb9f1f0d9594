#include "muster/group/p2p/outgoing.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "muster/group/p2p/p2p_engine.h"

namespace muster {
namespace {

/// A long message is sent in pieces of this size, so that other messages can be sent between the pieces.
constexpr size_t kPieceBytes = size_t{512} << 10;

size_t cost(const MessageOperation& operation) { return operation.data.bytes() + kMessageHeaderBytes; }

bool is_short(const MessageOperation& operation) { return operation.data.bytes() <= kEagerBytes; }

}  // namespace

void OutgoingMessages::send(const MessagePtr& operation) {
  if (waiting_.size() + announced_.size() >= kMaxRequests) {
    return engine_.finish(
        operation,
        fail(ErrorCode::kResourceExhausted,
             fmt::format("{} messages to rank {} wait to be received; wait for some", kMaxRequests, peer()), peer()));
  }
  if (is_open()) return start(operation);
  waiting_.push(operation);
  if (!is_short(*operation) || window_ < cost(*operation)) return;
  window_ -= cost(*operation);
  operation->copied = true;
  operation->copy.resize(operation->data.bytes());
  operation->data.read(0, operation->copy.data(), operation->copy.size());
  ++copies_;
  engine_.on_copied(1);
  engine_.finish(operation, {});
}

void OutgoingMessages::drop_copies() { engine_.on_copied(-std::exchange(copies_, 0)); }

void OutgoingMessages::abandon() {
  detach();
  drop_copies();
  waiting_ = {};
  cleared_ = {};
  announced_.clear();
}

void OutgoingMessages::open(Link& link) {
  begin(link);
  while (!waiting_.empty() && is_open()) start(waiting_.pop());
}

void OutgoingMessages::start(const MessagePtr& operation) {
  if (operation->copied) return send_eagerly(operation);  // send() has already subtracted its cost from the window
  if (is_short(*operation) && window_ >= cost(*operation)) {
    window_ -= cost(*operation);
    return send_eagerly(operation);
  }
  operation->id = ++last_id_;
  announced_.emplace(operation->id, operation);
  write({.kind = MessageKind::kRequestToSend,
         .dtype = operation->data.dtype(),
         .tag = operation->tag,
         .id = operation->id,
         .bytes = operation->data.bytes()});
}

void OutgoingMessages::send_eagerly(const MessagePtr& operation) {
  const size_t bytes = operation->data.bytes();
  const MessageHeader header{
      .kind = MessageKind::kEager, .dtype = operation->data.dtype(), .tag = operation->tag, .bytes = bytes};
  if (operation->copied) {
    const ConstSegment payload{operation->copy.data(), bytes};
    return write(header, {&payload, 1}, [this, operation] {
      if (copies_ == 0) return;
      --copies_;
      engine_.on_copied(-1);
    });
  }
  write(header, segments_of<ConstSegment>(operation->data, 0, bytes),
        [this, operation] { engine_.finish(operation, {}); });
}

void OutgoingMessages::handle(const MessageHeader& header) {
  const auto found = announced_.find(header.id);
  if (found == announced_.end() || header.kind < MessageKind::kClearToSend) {
    return reject("it answers a message that was not announced");
  }
  const MessagePtr operation = found->second;
  if (operation->matched) return reject("it answers a message twice");
  if (header.credit > kEagerWindow - window_) return reject("it returns more credit than it used");
  window_ += header.credit;
  header.kind == MessageKind::kClearToSend ? on_clear_to_send(operation) : on_reject(operation, header);
  read_header();
}

void OutgoingMessages::on_clear_to_send(const MessagePtr& operation) {
  if (operation->data.bytes() == 0) {
    announced_.erase(operation->id);
    return engine_.finish(operation, {});
  }
  operation->matched = true;
  cleared_.push(operation);
  if (cleared_.size() == 1) send_next_piece();
}

void OutgoingMessages::on_reject(const MessagePtr& operation, const MessageHeader& wanted) {
  announced_.erase(operation->id);
  const Dtype dtype = operation->data.dtype();
  const std::string what =
      wanted.bytes == operation->data.bytes()
          ? fmt::format("the message is {}, rank {} receives {}", name(dtype), peer(), name(wanted.dtype))
          : fmt::format("the message has {} bytes, rank {} receives {}", operation->data.bytes(), peer(), wanted.bytes);
  engine_.finish(operation, fail(ErrorCode::kMismatch, fmt::format("{} with tag {}", what, operation->tag), peer()));
}

/// Sends the next piece of the first message that is cleared to send. Only one piece is in flight at a time.
void OutgoingMessages::send_next_piece() {
  const MessagePtr& operation = cleared_.front();
  const size_t bytes = std::min(kPieceBytes, operation->data.bytes() - operation->moved);
  const auto payload = segments_of<ConstSegment>(operation->data, operation->moved, bytes);
  write({.kind = MessageKind::kData, .id = operation->id, .bytes = bytes}, payload, [this, bytes] {
    const MessagePtr current = cleared_.front();
    current->moved += bytes;
    if (current->moved == current->data.bytes()) {
      cleared_.pop();
      announced_.erase(current->id);
      engine_.finish(current, {});
    }
    if (!cleared_.empty()) send_next_piece();
  });
}

}  // namespace muster
