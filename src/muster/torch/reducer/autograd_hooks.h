#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "muster/torch/reducer/reducer_buckets.h"

namespace muster {

/// A node of the autograd graph, in the pointer type of this torch version.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// The numbers, ascending, of the parameters whose gradient accumulators cannot be reached from the outputs. Ignores
/// outputs that need no gradient.
std::vector<size_t> find_unused(const std::vector<at::Tensor>& outputs, const std::vector<NodePtr>& accumulators);

/// The hooks that run when autograd has accumulated a parameter's gradient.
class AutogradHooks {
 public:
  /// Calls `on_gradient` with the parameter's number. Throws for a parameter that has no gradient or is given twice.
  void attach(const ReducerContext& context, const std::function<void(size_t)>& on_gradient);
  void detach();
  /// Throws if a parameter has another gradient accumulator than in attach(): no hook would see its gradients.
  void check(const ReducerContext& context) const;
  const std::vector<NodePtr>& accumulators() const { return accumulators_; }

 private:
  std::vector<NodePtr> accumulators_;  ///< by parameter; held here, because a parameter holds it only weakly
  std::vector<uintptr_t> keys_;        ///< of the hooks, by parameter; empty once detached
};

}  // namespace muster
