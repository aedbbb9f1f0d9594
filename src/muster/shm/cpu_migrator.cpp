#include "muster/shm/cpu_migrator.h"

#include <algorithm>

#include "muster/base/wait_policy.h"

namespace muster {
namespace {

/// One message may come from this core by chance: the writer has moved since, or this thread has.
constexpr int kMessagesOnOneCore = 8;

}  // namespace

int usable_cores() {
  const cpu_set_t set = usable_core_set();
  return std::max(1, CPU_COUNT(&set));
}

cpu_set_t usable_core_set() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) CPU_ZERO(&set);
  return set;
}

void CpuMigrator::migrate_away(std::span<const uint32_t> taken) {
  const TimePoint now = steady_clock().now();
  if (now < next_) return;
  next_ = now + kMigrationInterval;
  const cpu_set_t allowed = usable_core_set();
  cpu_set_t free = allowed;
  for (const uint32_t core : taken) {
    if (core < CPU_SETSIZE) CPU_CLR(core, &free);
  }
  if (CPU_COUNT(&free) == 0) return;
  // The first call moves the thread at once, the second restores its affinity.
  if (sched_setaffinity(0, sizeof(free), &free) == 0) (void)sched_setaffinity(0, sizeof(allowed), &allowed);
}

bool CpuMigrator::is_shared_with(uint32_t core) {
  on_own_core_ = core == current() ? on_own_core_ + 1 : 0;
  if (on_own_core_ < kMessagesOnOneCore) return false;
  on_own_core_ = 0;
  return true;
}

}  // namespace muster
