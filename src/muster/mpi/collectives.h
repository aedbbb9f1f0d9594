#pragma once

#include "muster/collective/operation.h"
#include "muster/mpi/library.h"

namespace muster::mpi {

/// Runs a collective on a communicator, and blocks until it has ended at this rank. `operation` is
/// valid (group/operations.h), and its reduction is a sum where MPI has no such operation (group/engine/scaling.h).
/// kUnsupported for what MPI does not have: at all ranks, or at some if differs_by_rank().
Result<> run_collective(const Library& mpi, Handle comm, Rank self, const Operation& operation);

/// True if MPI may take the call at one rank and not at another: ranks give it different amounts.
bool differs_by_rank(const Operation& operation);

}  // namespace muster::mpi
