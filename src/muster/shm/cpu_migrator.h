#pragma once

#include <sched.h>

#include <cstdint>
#include <span>

#include "muster/base/clock.h"

namespace muster {

/// Cores that this thread may run on.
int usable_cores();
/// Which they are; none if that cannot be told.
cpu_set_t usable_core_set();

/// Keeps ranks that wait for each other off the same core. Left alone, two of them can stay on one for seconds: each
/// hands the core to the other and sleeps, so no scheduler sees a reason to part them, and every step costs two
/// switches. One thread at a time.
class CpuMigrator {
 public:
  /// The core that this thread runs on; no system call.
  static uint32_t current() { return static_cast<uint32_t>(sched_getcpu()); }
  /// Moves this thread to a core that is in none of `taken`, if it may use one, and leaves its affinity as it was. Does
  /// nothing if it did so within the last milliseconds: where others want the cores too, they come first.
  void migrate_away(std::span<const uint32_t> taken);

 private:
  TimePoint next_;
};

}  // namespace muster
