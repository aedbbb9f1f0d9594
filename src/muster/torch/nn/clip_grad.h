#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "muster/group/group.h"

namespace muster::nn {

/// Collective, for sharded gradients. Scales the gradients of the parameters `mine` so that the norm over all ranks is
/// at most `max_norm`, and returns the norm before. Each gradient must be at only one rank. (With
/// DistributedDataParallel every rank has all gradients: use torch::nn::utils::clip_grad_norm_, or
/// ZeroRedundancyOptimizer::clip_grad_norm_.) `norm_type`: p of the p-norm, also 0 and infinity. Parameters without a
/// gradient are ignored. With `error_if_nonfinite` a norm that is not finite throws c10::ValueError at all ranks and
/// changes nothing.
double clip_grad_norm_(Group& group, const std::vector<at::Tensor>& mine, double max_norm, double norm_type = 2,
                       bool error_if_nonfinite = false);

}  // namespace muster::nn
