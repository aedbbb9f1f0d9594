#pragma once

#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster::mpi {

/// True if `muster run` has started this process as one of several ranks, and no launcher of MPI has.
bool started_by_muster();

/// Makes this process answer what its own MPI asks a launcher when it starts and ends: the addresses of the other
/// ranks, and barriers. The answers come from the job's store, so the job may have several hosts. The protocol is PMI 1
/// ("simple PMI"), which MPICH and its relatives speak, so MPI_Init() finds the ranks of `muster run`.
///
/// All ranks must call it, before MPI_Init(). It sets PMI_FD, PMI_RANK and PMI_SIZE, for MPI_Init(). A rank that does
/// not come within `timeout` ends this process, because MPI_Init() cannot fail in time.
Result<> serve_pmi(Duration timeout);

}  // namespace muster::mpi
