#include "muster/group/p2p/channel.h"

#include <fmt/format.h>

namespace muster {

std::string MessageOperation::to_string() const {
  const std::string other = peer == kAnyRank ? "any rank" : fmt::format("rank {}", peer);
  return fmt::format("{} {} with tag {} ({}[{}])", receives ? "receive from" : "send to", other, tag,
                     name(data.dtype()), data.count());
}

void MessageChannel::begin(Link& link) {
  link_ = &link;
  read_header();
}

void MessageChannel::write(const MessageHeader& header, std::span<const ConstSegment> payload,
                           std::function<void()> written) {
  auto frame = std::make_unique<Frame>(Frame{encode(header), std::move(written)});
  segments_.assign(1, {frame->header.data(), frame->header.size()});
  segments_.insert(segments_.end(), payload.begin(), payload.end());
  frames_.push(std::move(frame));
  link_->send(segments_, [this](const Result<>& sent) {
    const std::unique_ptr<Frame> done = frames_.pop();
    if (!sent) detach();
    if (done->written && !detached_) done->written();
  });
}

void MessageChannel::read_header() {
  const Segment into{header_.data(), header_.size()};
  link_->receive({&into, 1}, [this](const Result<>& received) {
    if (!received) detach();
    if (detached_) return;
    const auto header = parse_message_header(header_);
    if (!header) return reject(header.error().message);
    handle(*header);
  });
}

void MessageChannel::read_payload(std::span<const Segment> into, std::function<void()> then) {
  then_ = std::move(then);
  link_->receive(into, [this](const Result<>& received) {
    if (!received) detach();
    if (!detached_) std::exchange(then_, nullptr)();
  });
}

void MessageChannel::reject(const std::string& what) {
  detach();
  link_->close(Error{ErrorCode::kProtocol, fmt::format("{}: {}", link_->peer().to_string(), what), peer_, {}});
}

}  // namespace muster
