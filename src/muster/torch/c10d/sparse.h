#pragma once

#include <ATen/core/Tensor.h>

#include "muster/group/group.h"

namespace muster {

/// All ranks' sparse COO tensors added up in rank order, coalesced. They differ in what elements they have, but not in
/// shape and dtype, else the error names the rank that does. Blocks; several operations, so none of this group may come
/// between them. `sequence`, if any, gets the number of the last operation.
at::Tensor sum_sparse(Group& group, const at::Tensor& tensor, const CallOptions& options = {},
                      uint64_t* sequence = nullptr);

/// No elements, in `dense`'s shape and dtype, laid out as the gradient of an embedding: the first dimension is sparse.
at::Tensor empty_sparse_like(const at::Tensor& dense);

}  // namespace muster
