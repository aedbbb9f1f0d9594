#pragma once

#include <sched.h>

#include <cstdint>
#include <span>

#include "muster/base/clock.h"

namespace muster {

/// The number of cores that this thread may run on.
int usable_cores();
/// The set of these cores; empty if the kernel does not tell.
cpu_set_t usable_core_set();

/// Keeps ranks that wait for each other on different cores. Otherwise two ranks can share a core for seconds: each
/// hands the core to the other and sleeps, so the scheduler sees no reason to separate them, and every step costs two
/// context switches. Not thread-safe.
class CpuMigrator {
 public:
  /// The core that this thread runs on; no system call.
  static uint32_t current() { return static_cast<uint32_t>(sched_getcpu()); }
  /// Moves this thread to a core that is not in `taken`, if it may use one. Its affinity does not change. Does nothing
  /// within kMigrationInterval of the last migration.
  void migrate_away(std::span<const uint32_t> taken);
  /// Call this when what the thread polled for has come; `core` is the core of the thread that wrote it. True if that
  /// was this thread's own core several times in a row: the two threads share the core.
  bool is_shared_with(uint32_t core);
  /// Begins to count again, because this thread has slept.
  void forget() { on_own_core_ = 0; }

 private:
  int on_own_core_ = 0;  ///< calls of is_shared_with() in a row with this thread's core
  TimePoint next_;
};

}  // namespace muster
