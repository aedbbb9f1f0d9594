#pragma once

#include <string>

#include "muster/base/clock.h"
#include "muster/store/store.h"

namespace muster::mpi {

constexpr const char* kPmixServerCommand = "pmix-server";  ///< of `muster`
constexpr const char* kPmixServes = "serves\n";            ///< it prints this, or why it cannot

/// Where the server leaves the variables of a rank, "NAME=value\n" each.
Key pmix_variables_key(int rank);

/// Serves the ranks of this host: answers what Open MPI asks its launcher, which are the addresses of the other ranks.
/// The servers of several hosts exchange them over the job's store. `library`: the path of libpmix. Ends when all ranks
/// of this host have ended, and removes what they have left in /dev/shm. Returns the exit status.
int run_pmix_server(const std::string& library, Duration timeout);

}  // namespace muster::mpi
