#pragma once

// The collectives for C++ programs that use libtorch. Form a group, then call with tensors:
//
//   const auto deadline = muster::Deadline::after(60s);
//   auto store = muster::value_or_throw(muster::store_from_environment(deadline));       // under `muster run`
//   auto options = muster::value_or_throw(muster::group_options_from_environment());
//   auto group = muster::value_or_throw(muster::Group::form(*store, {rank, size}, options));
//   muster::all_reduce(*group, gradient, muster::ReduceOp::kAverage);
//
// Every call blocks until it is done at this rank and throws muster::ErrorException (torch/exception.h) when it fails.
// Tensors are on the CPU, of any dtype the operation has, of any strides; shapes and dtypes are equal at all ranks.

#include <ATen/core/Tensor.h>

#include <vector>

#include "muster/group/group.h"
#include "muster/torch/exception.h"

namespace muster {

/// In place: every rank's `tensor` becomes the combination of all.
void all_reduce(Group& group, at::Tensor tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
/// The same for many tensors of one dtype (a model's gradients): sent as one.
void all_reduce(Group& group, const std::vector<at::Tensor>& tensors, ReduceOp op = ReduceOp::kSum,
                const CallOptions& options = {});
/// In place: every rank's `tensor` becomes root's.
void broadcast(Group& group, at::Tensor tensor, Rank root = 0, const CallOptions& options = {});
/// Returns a tensor of shape [size, *tensor.shape]: slot r is rank r's `tensor`.
at::Tensor all_gather(Group& group, const at::Tensor& tensor, const CallOptions& options = {});
/// Returns when every rank has called it.
void barrier(Group& group, const CallOptions& options = {});

}  // namespace muster
