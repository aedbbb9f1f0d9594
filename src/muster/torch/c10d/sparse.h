#pragma once

#include <ATen/core/Tensor.h>

#include "muster/group/group.h"

namespace muster {

/// Adds up the sparse COO tensors of all ranks, in rank order; the sum is coalesced. Shape and dtype must be the same
/// at all ranks: the error names a rank that differs. Blocks, and runs several operations: no other call of this group
/// may come between them. `sequence`, if any, gets the number of the last operation.
at::Tensor sum_sparse(Group& group, const at::Tensor& tensor, const CallOptions& options = {},
                      uint64_t* sequence = nullptr);

/// A tensor without elements, of `dense`'s shape and dtype, laid out as the gradient of an embedding: the first
/// dimension is sparse.
at::Tensor empty_sparse_like(const at::Tensor& dense);

}  // namespace muster
