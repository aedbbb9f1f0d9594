#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/error.h"
#include "muster/store/store.h"

namespace muster::mpi {

/// A rank of `muster run`.
struct JobRank {
  pid_t pid = 0;
  std::string host_name;  ///< for messages
  std::string host;       ///< equal for ranks that can share memory and see each other's processes
};

/// The ranks of `muster run`, before MPI has started.
struct JobRanks {
  std::unique_ptr<Store> store;  ///< for what MPI exchanges
  std::string name;              ///< random, drawn by rank 0; empty for a process that is no rank
  int own = 0;
  std::vector<JobRank> all;

  int size() const { return static_cast<int>(all.size()); }
};

/// The deadline of a wait for ranks that all run: they may work for long, and the launcher notices the end of one.
inline constexpr Duration kNoLimit = std::chrono::hours(24 * 365);

/// True if `muster run` has started this process as one of several ranks, and no launcher of MPI has.
bool started_by_muster();

/// Waits until all ranks have called it. kTimeout names the first rank that has not.
Result<JobRanks> exchange_ranks(Duration timeout);

/// The ranks, for a process that is none. It has the environment of rank `own`.
Result<JobRanks> lookup_ranks(Duration timeout);

/// Waits for all keys. An error names the first one that is absent, so a key must be a name for what it has.
Result<std::vector<Bytes>> get_all(Store& store, const std::vector<Key>& keys, Duration timeout);

}  // namespace muster::mpi
