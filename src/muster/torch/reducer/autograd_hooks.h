#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "muster/torch/reducer/reducer_context.h"
#include "muster/torch/reducer/reducer_unused.h"

namespace muster {

/// The hooks that run when autograd has accumulated a parameter's gradient.
class AutogradHooks {
 public:
  /// Calls `on_gradient` with the parameter's number. Throws for a parameter that has no gradient or is given twice.
  void attach(const ReducerContext& context, const std::function<void(size_t)>& on_gradient);
  void detach();
  /// Throws if a parameter has got another accumulator since, which no hook sees.
  void check(const ReducerContext& context) const;
  const std::vector<NodePtr>& accumulators() const { return accumulators_; }

 private:
  std::vector<NodePtr> accumulators_;  ///< by parameter, which itself holds it weakly
  std::vector<uintptr_t> keys_;        ///< of the hooks, by parameter; empty once detached
};

}  // namespace muster
