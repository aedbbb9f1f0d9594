#pragma once

#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/error.h"
#include "muster/mpi/bootstrap/job_ranks.h"

namespace muster::mpi {

/// Lets Open MPI find the ranks of `muster run`. On each host, the first rank starts a process with a PMIx server
/// (pmix_server.h) for all of them: PMIx cannot have client and server in one process.
///
/// Returns the names of the variables that it has set for MPI_Init(). kUnavailable if there is no libpmix.so.2. If a
/// rank does not reach MPI_Init() within `timeout`, the server ends this process. MPI_Finalize() waits for the other
/// ranks as long as they work.
Result<std::vector<std::string>> serve_pmix(const JobRanks& ranks, Duration timeout);

}  // namespace muster::mpi
