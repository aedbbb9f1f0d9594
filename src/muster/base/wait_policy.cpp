#include "muster/base/wait_policy.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace muster {
namespace {

/// After a burst of kSlowYieldBurst, slow yields take at most 1/kSlowYieldShare of the time.
constexpr int kSlowYieldShare = 64;
constexpr Duration kSlowYieldBurst = 20ms;
/// The kernel's default is about 3 ms.
constexpr Duration kShortSlice = 500us;

constexpr uint64_t kResetOnFork = 1;  ///< SCHED_FLAG_RESET_ON_FORK: it also resets a negative nice value

/// struct sched_attr of Linux. The C library has neither it nor its system calls.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = SCHED_OTHER;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime = 0, deadline = 0, period = 0;
};

}  // namespace

void take_short_slices() {
  SchedulingAttributes attributes;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0 || attributes.policy != SCHED_OTHER) return;
  attributes.runtime = static_cast<uint64_t>(kShortSlice.count());
  if (attributes.nice >= 0) attributes.flags = kResetOnFork;  // for threads that callbacks start
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
}

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
