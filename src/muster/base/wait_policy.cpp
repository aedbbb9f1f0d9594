#include "muster/base/wait_policy.h"

#include <sched.h>

#include <algorithm>

namespace muster {
namespace {

/// After a burst of kSlowYieldBurst, slow yields take at most 1/kSlowYieldShare of the time.
constexpr int kSlowYieldShare = 64;
constexpr Duration kSlowYieldBurst = 20ms;

}  // namespace

YieldBudget::YieldBudget(Duration cheap, const Clock& clock) : cheap_(cheap), clock_(clock) {}

bool YieldBudget::yield() {
  const TimePoint before = clock_.now();
  if (paid_until_ > before + kSlowYieldShare * kSlowYieldBurst) return false;
  sched_yield();
  const TimePoint after = clock_.now();
  const Duration taken = after - before;
  if (taken > cheap_) paid_until_ = std::max(paid_until_, after) + kSlowYieldShare * taken;
  return true;
}

}  // namespace muster
