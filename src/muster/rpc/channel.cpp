#include "muster/rpc/channel.h"

#include <fmt/format.h>

#include <utility>

namespace muster::rpc {

Channel::Channel(Link& link, uint64_t max_bytes, Handler handler, std::function<void(const Error&)> ended)
    : link_(link), max_bytes_(max_bytes), handler_(std::move(handler)), ended_(std::move(ended)) {
  read_batch();
}

Channel::~Channel() { alive_->value = false; }

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
  std::vector<ConstSegment> segments{{sent->batch.data(), sent->batch.size()}};
  for (const Buffer& part : sent->long_parts) segments.push_back({part.data(), part.size()});
  // The completion owns the bytes if the channel is destroyed before they are written.
  const std::shared_ptr<Alive> alive = alive_;
  Sent* const bytes = sent.release();
  ++writing_;
  link_.send(segments, [this, alive, bytes](const Result<>&) {
    std::unique_ptr<Sent> done(bytes);
    if (!alive->value) return;
    --writing_;
    done->long_parts.clear();
    spare_ = std::move(done);
  });
}

// ---- reading

template <class Then>
Completion Channel::guarded(Then then) {
  return [this, alive = alive_, then](const Result<>& received) {
    if (!alive->value) return;
    if (received) return then();
    ended_(received.error());
  };
}

/// If the link has ended, the receive fails with the reason.
void Channel::read_batch() {
  const Segment into{header_.data(), header_.size()};
  link_.receive({&into, 1}, guarded([this] { on_batch_header(); }));
}

void Channel::on_batch_header() {
  const Result<size_t> bytes = parse_batch_header(header_);
  if (!bytes) return reject(bytes.error());
  input_.resize(*bytes);
  const Segment into{input_.data(), input_.size()};
  link_.receive({&into, 1}, guarded([this] {
                  unread_ = input_;
                  handle_messages();
                }));
}

void Channel::handle_messages() {
  const std::shared_ptr<Alive> alive = alive_;
  while (!unread_.empty()) {
    Result<ParsedMessage> parsed = parse_message(unread_, max_bytes_);
    if (!parsed) return reject(parsed.error());
    if (!parsed->long_parts.empty()) return receive_long_parts(std::move(*parsed));
    handler_(std::move(*parsed));
    if (!alive->value) return;
    if (!link_.is_open()) break;
  }
  read_batch();
}

/// The lengths were checked against the cap, but the peer may still announce more than this process can allocate.
void Channel::receive_long_parts(ParsedMessage parsed) {
  partial_ = std::move(parsed);
  std::vector<Segment> into;
  try {
    for (const auto& [index, bytes] : partial_.long_parts) {
      if (index == ParsedMessage::kHeadPart) {
        partial_.message.head.resize(bytes);
        into.push_back({partial_.message.head.data(), bytes});
      } else {
        Buffer& segment = partial_.message.segments[index] = Buffer::allocate(bytes);
        into.push_back({segment.data(), bytes});
      }
    }
  } catch (const std::bad_alloc&) {
    return reject(Error{ErrorCode::kResourceExhausted, "no memory for a message that arrives"});
  }
  link_.receive(into, guarded([this] {
                  const std::shared_ptr<Alive> alive = alive_;
                  handler_(std::move(partial_));
                  if (alive->value) handle_messages();
                }));
}

void Channel::reject(const Error& why) {
  Error error = why;
  error.message = fmt::format("{}: {}", link_.peer().to_string(), why.message);
  error.rank = link_.peer().rank;
  link_.close(error);
  read_batch();  // which calls ended_
}

}  // namespace muster::rpc
