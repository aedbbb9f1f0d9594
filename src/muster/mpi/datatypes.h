#pragma once

#include "muster/base/dtype.h"
#include "muster/mpi/library.h"

namespace muster::mpi {

/// The MPI type of `dtype`, which has size_of(dtype) bytes. Types that MPI does not know are made of bytes.
/// Thread-safe.
Result<Handle> type_of(const Library& mpi, Dtype dtype);

/// The MPI operation that combines elements of `dtype`, which must be reducible. It is MPI's own where that gives the
/// results of muster's kernels, else one that calls them. For kAverage and kPremulSum it is the sum. Thread-safe.
Result<Handle> op_of(const Library& mpi, Dtype dtype, ReduceOp op);

/// Frees what these functions have made. For the end of MPI, when nothing uses them.
void free_datatypes(const Library& mpi);

}  // namespace muster::mpi
