#pragma once

#include <functional>
#include <queue>
#include <vector>

#include "muster/base/clock.h"

namespace muster {

/// A clock that jumps to the next event. The same calls give the same run.
class VirtualTime : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void at(TimePoint when, std::function<void()> what) {
    events_.push({std::max(when, now_), order_++, std::move(what)});
  }
  void after(Duration delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }
  /// False if no event is left.
  bool step() {
    if (events_.empty()) return false;
    Event event = std::move(const_cast<Event&>(events_.top()));  // the comparison does not use `what`, which is moved
    events_.pop();
    now_ = event.when;
    ++steps_;
    event.what();
    return true;
  }
  uint64_t steps() const { return steps_; }

 private:
  struct Event {
    TimePoint when;
    uint64_t order;
    std::function<void()> what;
    bool operator<(const Event& other) const {  // inverted: the queue's top is its greatest element
      return when != other.when ? other.when < when : other.order < order;
    }
  };
  TimePoint now_{1};
  uint64_t order_ = 0, steps_ = 0;
  std::priority_queue<Event> events_;
};

}  // namespace muster
