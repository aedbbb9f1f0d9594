#include "muster/rpc/channel.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace muster::rpc {

Channel::Channel(Link& link, uint64_t max_bytes, Events events)
    : link_(link), max_bytes_(max_bytes), events_(std::move(events)) {}

// ---- writing

void Channel::write(const MessageHeader& header, std::string_view name, const Message& message) {
  if (!batch_.add(header, name, message, long_parts_)) {
    flush();
    batch_.add(header, name, message, long_parts_);
  }
  if (!long_parts_.empty()) flush();
}

void Channel::flush() {
  if (batch_.empty() || !link_.is_open()) return;
  auto sent = spare_ ? std::move(spare_) : std::make_unique<Sent>();
  sent->batch = batch_.take(std::move(sent->batch));
  sent->long_parts = std::exchange(long_parts_, {});
  segments_.assign(1, {sent->batch.data(), sent->batch.size()});
  for (const Buffer& part : sent->long_parts) segments_.push_back({part.data(), part.size()});
  sent->bytes = 0;
  for (const ConstSegment& segment : segments_) sent->bytes += segment.bytes;
  unwritten_ += sent->bytes;
  sent_.push(std::move(sent));
  link_.send(segments_, [this](const Result<>&) {
    spare_ = sent_.pop();
    spare_->long_parts.clear();
    unwritten_ -= spare_->bytes;
    if (events_.written) events_.written();
  });
}

// ---- reading

/// If the link has ended, the receive fails with the reason.
void Channel::read_batch() {
  const Segment into{header_.data(), header_.size()};
  link_.receive({&into, 1}, [this](const Result<>& received) {
    if (!received) return events_.ended(received.error());
    on_batch_header();
  });
}

void Channel::on_batch_header() {
  const Result<size_t> bytes = parse_batch_header(header_);
  if (!bytes) return reject(bytes.error());
  input_.resize(*bytes);
  const Segment into{input_.data(), input_.size()};
  link_.receive({&into, 1}, [this](const Result<>& received) {
    if (!received) return events_.ended(received.error());
    unread_ = input_;
    last_read_ = steady_clock().now();
    handle_messages();
  });
}

void Channel::handle_messages() {
  while (!unread_.empty() && !closed_) {
    Result<ParsedMessage> parsed = parse_message(unread_, max_bytes_);
    if (!parsed) return reject(parsed.error());
    parsed->arrived = last_read_;
    if (const auto valid = events_.announced(*parsed); !valid) return reject(valid.error());
    if (!parsed->long_parts.empty()) {
      partial_ = std::move(*parsed);
      return receive_head();
    }
    events_.received(std::move(*parsed));
  }
  read_batch();
}

/// The memory of a long head is cleared, and so used at once. So it grows with the bytes that have arrived.
void Channel::receive_head() {
  Bytes& head = partial_.message.head;
  const size_t arrived = head.size();
  const size_t left = partial_.header.head_bytes - arrived;
  if (left == 0) return receive_segments();
  try {
    head.resize(arrived + std::min(left, std::max(arrived, kHeadPiece)));
  } catch (const std::bad_alloc&) {
    return reject_for_memory();
  }
  const Segment into{head.data() + arrived, head.size() - arrived};
  link_.receive({&into, 1}, [this](const Result<>& received) {
    if (!received) return events_.ended(received.error());
    receive_head();
  });
}

/// The lengths were checked against the cap, but the peer may still announce more than this process can allocate. The
/// memory of a long segment is only used as its bytes arrive.
void Channel::receive_segments() {
  std::vector<Segment> into;
  try {
    for (const auto& [index, bytes] : partial_.long_parts) {
      if (index == ParsedMessage::kHeadPart) continue;
      Buffer& segment = partial_.message.segments[index] = Buffer::allocate(bytes);
      into.push_back({segment.data(), bytes});
    }
  } catch (const std::bad_alloc&) {
    return reject_for_memory();
  }
  link_.receive(into, [this](const Result<>& received) {
    if (!received) return events_.ended(received.error());
    last_read_ = steady_clock().now();
    events_.received(std::move(partial_));
    handle_messages();
  });
}

void Channel::reject_for_memory() {
  reject(Error{ErrorCode::kResourceExhausted, "no memory for a message that arrives"});
}

void Channel::reject(const Error& why) {
  Error error = why;
  error.message = fmt::format("{}: {}", link_.peer().to_string(), why.message);
  error.rank = link_.peer().rank;
  close(error);
  read_batch();  // which calls events_.ended
}

void Channel::close(const Error& why) {
  closed_ = true;
  link_.close(why);
}

}  // namespace muster::rpc
