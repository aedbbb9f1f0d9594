#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "muster/torch/rpc/worker.h"

namespace torch::optim {
class Optimizer;
}

namespace muster::rpc {

/// The part of a DistributedOptimizer at one worker.
class LocalOptimizer;
/// The options of an optimizer, by torch's names in Python: "lr", "momentum", "weight_decay". Those that are switched
/// on or off take 1 or 0.
using OptimizerOptions = std::map<std::string, double>;

/// Updates parameters of several workers where they are, with the gradients of an AutogradScope. Each worker that has
/// parameters gets an optimizer of its own. Steps of several trainers at one worker run one after the other; each uses
/// the gradients of its own context. Parameters without a gradient do not change. Thread-safe.
class DistributedOptimizer {
 public:
  /// `kind`: "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", or one that the workers have added with add_optimizer().
  /// Waits until the optimizers are there. Throws ArgumentException without parameters, RemoteException if a worker
  /// does not know the kind or one of the options.
  DistributedOptimizer(const Worker& worker, const std::string& kind, const std::vector<RRef<at::Tensor>>& parameters,
                       const OptimizerOptions& options);

  /// Updates the parameters at all workers, and waits for that. `context`: AutogradScope::id(). Throws what a worker
  /// has thrown; the others have then updated their parameters.
  void step(int64_t context, const CallOptions& options = {}) const;

 private:
  const Worker& worker_;
  std::vector<RRef<std::shared_ptr<LocalOptimizer>>> optimizers_;
};

/// Makes a kind of optimizer known at this worker.
using OptimizerFactory =
    std::function<std::unique_ptr<::torch::optim::Optimizer>(std::vector<at::Tensor>, const OptimizerOptions&)>;
void add_optimizer(const std::string& kind, OptimizerFactory factory);

/// Adds the functions that DistributedOptimizer calls. Worker does this itself.
void add_optimizer_functions(Worker& worker);

}  // namespace muster::rpc
