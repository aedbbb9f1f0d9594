#pragma once

#include "muster/base/clock.h"
#include "muster/base/error.h"
#include "muster/mpi/bootstrap/job_ranks.h"

namespace muster::mpi {

/// Makes this process answer what its own MPI asks a launcher when it starts and ends: the addresses of the other
/// ranks, and barriers. The answers come from the job's store, so the job may have several hosts. The protocol is PMI 1
/// ("simple PMI"), which MPICH and its relatives speak, so MPI_Init() finds the ranks of `muster run`.
///
/// It sets PMI_FD, PMI_RANK and PMI_SIZE, for MPI_Init(). MPI_Init() cannot fail in time: if a rank does not reach it
/// within `timeout`, this process ends.
Result<> serve_pmi(JobRanks ranks, Duration timeout);
/// From now on `timeout` no longer counts: MPI_Finalize() waits for the other ranks as long as they work.
void mark_mpi_initialized();

}  // namespace muster::mpi
