#include "muster/torch/rpc/optimizer.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "muster/torch/exception.h"

namespace muster::rpc {
namespace {

namespace optim = ::torch::optim;

// Python workers have functions with these names, too.
constexpr const char* kCreateOptimizer = "muster.optim.create";
constexpr const char* kStep = "muster.optim.step";

/// Reads options, and refuses those that nobody has read.
class OptionReader {
 public:
  explicit OptionReader(const OptimizerOptions& given) : left_(given) {}
  double take(const std::string& name, double otherwise) {
    const auto found = left_.extract(name);
    return found.empty() ? otherwise : found.mapped();
  }
  bool take_flag(const std::string& name) { return take(name, 0) != 0; }
  void finish(const char* kind) const {
    if (left_.empty()) return;
    throw_error(Error{ErrorCode::kInvalidArgument, c10::str(kind, " has no option \"", left_.begin()->first, "\"")});
  }

 private:
  OptimizerOptions left_;
};

template <class Optimizer, class Options>
std::unique_ptr<optim::Optimizer> make_adam(const char* kind, std::vector<at::Tensor> parameters,
                                            const OptimizerOptions& given) {
  OptionReader in(given);
  Options options(in.take("lr", 1e-3));
  options.betas({in.take("beta1", 0.9), in.take("beta2", 0.999)}).eps(in.take("eps", 1e-8));
  options.weight_decay(in.take("weight_decay", options.weight_decay())).amsgrad(in.take_flag("amsgrad"));
  in.finish(kind);
  return std::make_unique<Optimizer>(std::move(parameters), options);
}

std::unique_ptr<optim::Optimizer> make_sgd(std::vector<at::Tensor> parameters, const OptimizerOptions& given) {
  OptionReader in(given);
  optim::SGDOptions options(in.take("lr", 1e-3));
  options.momentum(in.take("momentum", 0)).dampening(in.take("dampening", 0));
  options.weight_decay(in.take("weight_decay", 0)).nesterov(in.take_flag("nesterov"));
  in.finish("SGD");
  return std::make_unique<optim::SGD>(std::move(parameters), options);
}

std::unique_ptr<optim::Optimizer> make_adagrad(std::vector<at::Tensor> parameters, const OptimizerOptions& given) {
  OptionReader in(given);
  optim::AdagradOptions options(in.take("lr", 1e-2));
  options.lr_decay(in.take("lr_decay", 0)).weight_decay(in.take("weight_decay", 0)).eps(in.take("eps", 1e-10));
  options.initial_accumulator_value(in.take("initial_accumulator_value", 0));
  in.finish("Adagrad");
  return std::make_unique<optim::Adagrad>(std::move(parameters), options);
}

std::unique_ptr<optim::Optimizer> make_rmsprop(std::vector<at::Tensor> parameters, const OptimizerOptions& given) {
  OptionReader in(given);
  optim::RMSpropOptions options(in.take("lr", 1e-2));
  options.alpha(in.take("alpha", 0.99)).eps(in.take("eps", 1e-8)).weight_decay(in.take("weight_decay", 0));
  options.momentum(in.take("momentum", 0)).centered(in.take_flag("centered"));
  in.finish("RMSprop");
  return std::make_unique<optim::RMSprop>(std::move(parameters), options);
}

struct Factories {
  std::mutex mutex;
  std::unordered_map<std::string, OptimizerFactory> by_kind = {
      {"SGD", make_sgd},
      {"Adam",
       [](std::vector<at::Tensor> parameters, const OptimizerOptions& options) {
         return make_adam<optim::Adam, optim::AdamOptions>("Adam", std::move(parameters), options);
       }},
      {"AdamW",
       [](std::vector<at::Tensor> parameters, const OptimizerOptions& options) {
         return make_adam<optim::AdamW, optim::AdamWOptions>("AdamW", std::move(parameters), options);
       }},
      {"Adagrad", make_adagrad},
      {"RMSprop", make_rmsprop}};
};
Factories& factories() {
  static Factories factories;
  return factories;
}

OptimizerFactory find_factory(const std::string& kind) {
  const std::lock_guard lock(factories().mutex);
  const auto found = factories().by_kind.find(kind);
  if (found != factories().by_kind.end()) return found->second;
  throw_error(Error{ErrorCode::kInvalidArgument, "this worker knows no optimizer \"" + kind + "\""});
}

}  // namespace

void add_optimizer(const std::string& kind, OptimizerFactory factory) {
  const std::lock_guard lock(factories().mutex);
  factories().by_kind[kind] = std::move(factory);
}

class LocalOptimizer {
 public:
  LocalOptimizer(const std::string& kind, std::vector<at::Tensor> parameters, const OptimizerOptions& options)
      : parameters_(std::move(parameters)), optimizer_(find_factory(kind)(parameters_, options)) {}

  /// `gradients`: of this worker's parameters in one context. The parameters' own gradients are kept.
  void step(const std::vector<std::pair<at::Tensor, at::Tensor>>& gradients) {
    static std::mutex mutex;  // of all optimizers: they may share parameters
    const std::lock_guard lock(mutex);
    std::vector<at::Tensor> own;
    for (const at::Tensor& parameter : parameters_) {
      own.push_back(parameter.grad());
      parameter.mutable_grad() = at::Tensor();
      for (const auto& [leaf, gradient] : gradients) {
        if (leaf.is_same(parameter)) parameter.mutable_grad() = gradient;
      }
    }
    const auto restore = [&] {
      for (size_t i = 0; i < own.size(); ++i) parameters_[i].mutable_grad() = own[i];
    };
    try {
      optimizer_->step();
    } catch (...) {
      restore();
      throw;
    }
    restore();
  }

 private:
  const std::vector<at::Tensor> parameters_;
  const std::unique_ptr<optim::Optimizer> optimizer_;
};

void add_optimizer_functions(Worker& worker) {
  worker.add_function(kCreateOptimizer, [](const std::string& kind, const std::vector<RRef<at::Tensor>>& parameters,
                                           const OptimizerOptions& options) {
    std::vector<at::Tensor> tensors;
    for (const RRef<at::Tensor>& parameter : parameters) tensors.push_back(*parameter.local_value());
    return std::make_shared<LocalOptimizer>(kind, std::move(tensors), options);
  });
  worker.add_function(kStep, [weak = std::weak_ptr(worker.autograd())](
                                 const RRef<std::shared_ptr<LocalOptimizer>>& optimizer, int64_t context) {
    const auto autograd = weak.lock();
    if (!autograd || !autograd->contains(context)) return;  // no call of the context has reached this worker
    (*optimizer.local_value())->step(gradients_of(*autograd->find(context)));
  });
}

DistributedOptimizer::DistributedOptimizer(const Worker& worker, const std::string& kind,
                                           const std::vector<RRef<at::Tensor>>& parameters,
                                           const OptimizerOptions& options)
    : worker_(worker) {
  std::map<std::string, std::vector<RRef<at::Tensor>>> by_owner;
  for (const RRef<at::Tensor>& parameter : parameters) by_owner[parameter.owner()].push_back(parameter);
  if (by_owner.empty()) throw_error(Error{ErrorCode::kInvalidArgument, "an optimizer needs at least one parameter"});
  for (const auto& [owner, own] : by_owner) {
    optimizers_.push_back(
        worker.remote<std::shared_ptr<LocalOptimizer>>(owner, kCreateOptimizer, {}, kind, own, options));
  }
  for (const auto& optimizer : optimizers_) optimizer.wait();
}

void DistributedOptimizer::step(int64_t context, const CallOptions& options) const {
  (void)worker_.autograd()->find(context);  // throws if the context has ended
  std::vector<TypedFuture<void>> steps;
  for (const auto& optimizer : optimizers_) {
    steps.push_back(worker_.rpc_async<void>(optimizer.owner(), kStep, options, optimizer, context));
  }
  std::exception_ptr first;
  for (const auto& step : steps) {
    try {
      step.wait();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace muster::rpc
