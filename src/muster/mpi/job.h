#pragma once

#include <map>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster::mpi {

/// The variables that `muster run` gives its workers, for a job that a launcher of MPI has started: RANK, WORLD_SIZE,
/// LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, MUSTER_STORE and MUSTER_SECRET. All ranks of MPI must call
/// it. The first call starts the job's store at rank 0, which serves it until its process ends; later calls return the
/// same variables. A program that sets them can use all of muster: Group::join_job(), remote calls, stores.
///
/// A variable that the process has already keeps its value. If rank 0 has MUSTER_STORE, no store is started, and all
/// ranks must have it. If a rank does not come before the deadline, the job ends.
Result<std::map<std::string, std::string>> job_environment(const Deadline& deadline);

}  // namespace muster::mpi
