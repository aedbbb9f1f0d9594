#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace muster {

/// A node of the autograd graph, as this version of torch holds it.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// The parameters whose gradient accumulators are not to be reached from the outputs, by number, ascending. Outputs
/// that need no gradient count for nothing.
std::vector<size_t> find_unused(const std::vector<at::Tensor>& outputs, const std::vector<NodePtr>& accumulators);

}  // namespace muster
