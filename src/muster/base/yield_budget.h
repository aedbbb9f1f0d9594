#pragma once

#include "muster/base/clock.h"

namespace muster {

/// Gives the core to other threads that are ready to run, as long as that is cheap.
///
/// Among ranks that share a core a yield is the cheapest hand-over. Beside a thread that computes it costs a whole time
/// slice, some ms, at each of a collective's waits. So after a yield that took long there is none for many times as
/// long: the caller sleeps instead, and a sleeper gets the core back soon after it is woken. One thread at a time.
class YieldBudget {
 public:
  /// A yield that takes longer than `cheap` has given the core to a thread that computes.
  explicit YieldBudget(Duration cheap = 1ms, const Clock& clock = steady_clock());
  /// sched_yield(), unless it is not worth it now: then false, at once.
  bool yield();

 private:
  const Duration cheap_;
  const Clock& clock_;
  TimePoint next_;  ///< none before
};

}  // namespace muster
