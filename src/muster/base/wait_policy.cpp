#include "muster/base/wait_policy.h"

#include <sched.h>

namespace muster {
namespace {

/// Slow yields take at most one part in so many of the time.
constexpr int kSlowYieldShare = 64;

}  // namespace

YieldBudget::YieldBudget(Duration cheap, const Clock& clock) : cheap_(cheap), clock_(clock) {}

bool YieldBudget::yield() {
  const TimePoint before = clock_.now();
  if (before < next_) return false;
  sched_yield();
  const TimePoint after = clock_.now();
  const Duration taken = after - before;
  if (taken > cheap_) next_ = after + kSlowYieldShare * taken;
  return true;
}

}  // namespace muster
