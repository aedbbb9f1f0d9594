#pragma once

#include "muster/collective/operation.h"
#include "muster/mpi/library.h"

namespace muster::mpi {

/// Runs a collective on a communicator, and blocks until it has ended at this rank. `operation` is
/// valid (group/operations.h), and its reduction is a sum where MPI has no such operation (group/engine/scaling.h).
Result<> run_collective(const Library& mpi, Handle comm, Rank self, const Operation& operation);

/// kUnsupported if the call has more elements than MPI takes. All ranks agree, unless each gives another amount: an
/// all_to_all with counts.
Result<> check_size(const Operation& operation);

}  // namespace muster::mpi
