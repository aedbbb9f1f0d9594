#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "muster/group/group.h"

namespace muster::nn {

/// Collective, for gradients of which each rank has a share: scales those of `mine` so that the norm of all ranks'
/// together is at most `max_norm`, and returns what it was. No gradient may be in two ranks' shares (under
/// DistributedDataParallel every rank has all: use torch::nn::utils::clip_grad_norm_ there, or
/// ZeroRedundancyOptimizer::clip_grad_norm_). `norm_type`: p of the p-norm, also 0 and infinity. Parameters without a
/// gradient count for nothing. With `error_if_nonfinite` a norm that is no finite number throws c10::ValueError, at all
/// ranks, and changes nothing.
double clip_grad_norm_(Group& group, const std::vector<at::Tensor>& mine, double max_norm, double norm_type = 2,
                       bool error_if_nonfinite = false);

}  // namespace muster::nn
