#pragma once

#include <sched.h>

#include <cstdint>
#include <vector>

#include "muster/shm/cpu_migrator.h"
#include "muster/shm/host_comm_memory.h"

namespace muster {

/// The cores that the ranks of a host communicator run on and may use. Each rank publishes its own in the shared memory
/// and reads those of the others. Not thread-safe; each rank has its own object.
class RankCores {
 public:
  /// Borrows the memory. Publishes the cores that this rank may use.
  RankCores(HostCommMemory& memory, Rank rank, int size);
  /// True if there is a core for each rank, as far as this rank knows. Each rank may be bound to a few cores, so this
  /// class counts the cores that the ranks together may use.
  bool has_own_cores() const { return own_cores_; }
  /// Publishes the core that this thread runs on.
  void publish();
  /// Call this after a spin that did not succeed. Sometimes it counts the cores again. True if has_own_cores() changed.
  bool recheck_after_idle_spin();
  /// If the awaited rank uses this thread's core, migrates to a core that no rank uses.
  void migrate_away_from(Rank awaited);

 private:
  void publish_usable();

  HostCommMemory& memory_;
  const Rank rank_;
  const int size_;
  bool own_cores_;
  cpu_set_t usable_{};          ///< as published
  uint32_t core_ = ~0U;         ///< as published
  uint32_t idle_spins_ = 0;     ///< since the last count
  std::vector<uint32_t> used_;  ///< by rank; scratch space of migrate_away_from()
  CpuMigrator migrator_;
};

}  // namespace muster
