#include "muster/transport/striped_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "muster/base/check.h"
#include "muster/transport/link_base.h"

namespace muster {
namespace {

class StripedLink final : public LinkState {
 public:
  explicit StripedLink(std::vector<std::unique_ptr<Link>> subflows)
      : LinkState(subflows.front()->peer()), subflows_(std::move(subflows)) {
    for (const auto& subflow : subflows_) {
      subflow->on_close([this](const Error& why) {
        ++subflows_lost_;
        if (!loss_) loss_ = why;
        run_completions();
      });
    }
    subflows_[0]->set_control_handler([this](ByteView message) {
      deliver_control(message);
      run_completions();
    });
  }

  /// Destroys the subflows first: they must release the buffers of pending operations before the completions run.
  ~StripedLink() override {
    driving_ = true;
    subflows_.clear();
    destroy_pending();
  }

  void send(std::span<const ConstSegment> from, Completion completion) override {
    begin(sends_, from, std::move(completion), &Link::send);
  }
  void receive(std::span<const Segment> into, Completion completion) override {
    begin(receives_, into, std::move(completion), &Link::receive);
  }

  void close(Error why) override {
    if (is_open()) end(std::move(why));
    run_completions();
  }

  void ping(std::function<void()> pong) override {
    subflows_[0]->ping([this, pong = std::move(pong)] {
      completions_.push([pong](Result<>) { pong(); }, {});
      run_completions();
    });
  }

  void send_control(ByteView bytes) override { subflows_[0]->send_control(bytes); }
  const char* kind() const override { return subflows_[0]->kind(); }

 private:
  struct Operation {
    size_t parts = 0;  // parts that have not completed
    std::optional<Error> error;
    Completion completion;
  };
  struct Direction {
    uint64_t bytes = 0;  // given to subflows so far
    Fifo<std::shared_ptr<Operation>> operations;
  };

  template <class AnySegment>
  void begin(Direction& direction, std::span<const AnySegment> segments, Completion completion,
             void (Link::*move)(std::span<const AnySegment>, Completion)) {
    if (ended_) {
      completions_.push(std::move(completion), tl::unexpected(*ended_));
      return run_completions();
    }
    const auto parts = by_subflow(direction.bytes, segments);
    const auto operation = std::make_shared<Operation>();
    operation->completion = std::move(completion);
    for (const auto& part : parts) operation->parts += part.empty() ? 0 : 1;
    for (const AnySegment& segment : segments) direction.bytes += segment.bytes;
    direction.operations.push(operation);
    const bool was_driving = std::exchange(driving_, true);
    for (size_t subflow = 0; subflow < parts.size(); ++subflow) {
      if (parts[subflow].empty()) continue;
      (subflows_[subflow].get()->*move)(parts[subflow], [this, operation](Result<> result) {
        --operation->parts;
        if (!result && !operation->error) operation->error = result.error();
        run_completions();
      });
    }
    driving_ = was_driving;
    run_completions();
  }

  /// The parts of the stream's next bytes that each subflow carries.
  template <class AnySegment>
  std::vector<std::vector<AnySegment>> by_subflow(uint64_t at, std::span<const AnySegment> segments) const {
    std::vector<std::vector<AnySegment>> parts(subflows_.size());
    for (AnySegment segment : segments) {
      while (segment.bytes > 0) {
        const size_t bytes = std::min<size_t>(segment.bytes, kStripeBytes - at % kStripeBytes);
        AnySegment piece = segment;
        piece.bytes = bytes;
        parts[at / kStripeBytes % subflows_.size()].push_back(piece);
        at += bytes;
        using Byte = std::conditional_t<std::is_same_v<AnySegment, Segment>, uint8_t, const uint8_t>;
        segment.data = static_cast<Byte*>(segment.data) + bytes;
        segment.bytes -= bytes;
      }
    }
    return parts;
  }

  void complete_done(Direction& direction) {
    while (!ended_ && !direction.operations.empty()) {
      Operation& first = *direction.operations.front();
      if (first.error) return end(*first.error);
      if (first.parts > 0) return;
      completions_.push(std::move(first.completion), {});
      direction.operations.pop();
    }
  }

  void fail_operations() override {
    for (Direction* direction : {&sends_, &receives_}) {
      while (!direction->operations.empty()) {
        completions_.push(std::move(direction->operations.pop()->completion), tl::unexpected(*ended_));
      }
    }
  }

  /// Closes the subflows first: they must release the buffers of pending operations before the completions run.
  void end(Error why) {
    const bool was_driving = std::exchange(driving_, true);
    for (const auto& subflow : subflows_) subflow->close(why);
    driving_ = was_driving;
    set_ended(std::move(why));
  }

  /// Calls back. The last statement of every entry point, because a callback may destroy the link.
  void run_completions() {
    if (driving_) return;
    complete_done(receives_);
    complete_done(sends_);
    if (!ended_ && subflows_lost_ == subflows_.size()) end(*loss_);
    completions_.run();
  }

  std::vector<std::unique_ptr<Link>> subflows_;
  Direction sends_, receives_;
  size_t subflows_lost_ = 0;
  std::optional<Error> loss_;
  bool driving_ = false;  // a function calls subflows, and runs completions afterwards
};

}  // namespace

std::unique_ptr<Link> striped_link(std::vector<std::unique_ptr<Link>> subflows) {
  MUSTER_CHECK(!subflows.empty(), "a link needs a subflow");
  return std::make_unique<StripedLink>(std::move(subflows));
}

std::unique_ptr<Link> SubflowSet::add(std::unique_ptr<Link> link, const Subflow& subflow, LossHandler lost) {
  subflows_.resize(subflow.count);
  auto& own = subflows_[subflow.index];
  if (own) {
    const Rank rank = link->peer().rank;
    link->close(Error{ErrorCode::kAlreadyExists, fmt::format("rank {} is linked already", rank), rank, {}});
    return nullptr;
  }
  own = std::move(link);
  if (std::count(subflows_.begin(), subflows_.end(), nullptr) == 0) {
    auto subflows = std::exchange(subflows_, {});
    return subflows.size() == 1 ? std::move(subflows[0]) : striped_link(std::move(subflows));
  }
  own->on_close(std::move(lost));
  return nullptr;
}

void SubflowSet::close(const Error& why) {
  for (const auto& subflow : subflows_) {
    if (subflow) subflow->close(why);
  }
}

}  // namespace muster
