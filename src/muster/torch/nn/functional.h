#pragma once

// Collectives with gradients, as in torch.distributed.nn.functional. The loss that is differentiated is the sum of all
// ranks' losses. All ranks must call backward(), and all inputs must require gradients or none, because the backward of
// a collective is a collective too. Gradients of gradients work the same way.

#include <ATen/core/Tensor.h>

#include <memory>

#include "muster/group/group.h"

namespace muster::nn::functional {

// The results are new tensors; the inputs do not change. `op` is kSum or kAverage: others throw c10::ValueError.

at::Tensor all_reduce(const std::shared_ptr<Group>& group, const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum);
/// The other ranks than the root get zeros.
at::Tensor reduce(const std::shared_ptr<Group>& group, const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                  Rank root = 0);
/// Returns the root's tensor. The gradients of other ranks' tensors, which only give the shape, are zeros.
at::Tensor broadcast(const std::shared_ptr<Group>& group, const at::Tensor& tensor, Rank root = 0);
/// Returns a tensor of shape [size, *tensor.shape]: slot r is rank r's `tensor`.
at::Tensor all_gather(const std::shared_ptr<Group>& group, const at::Tensor& tensor);
/// Returns the reduction of slot `rank` over all ranks. `tensors` has the shape [size, ...].
at::Tensor reduce_scatter(const std::shared_ptr<Group>& group, const at::Tensor& tensors, ReduceOp op = ReduceOp::kSum);
/// Slot r of `tensors` goes to rank r, slot r of the result comes from rank r. Both have the shape [size, ...].
at::Tensor all_to_all(const std::shared_ptr<Group>& group, const at::Tensor& tensors);

}  // namespace muster::nn::functional
