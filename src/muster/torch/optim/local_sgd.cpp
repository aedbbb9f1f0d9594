#include "muster/torch/optim/local_sgd.h"

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/collectives.h"

namespace muster::optim {

PeriodicSyncOptimizer::PeriodicSyncOptimizer(const char* title, Group& group, torch::optim::Optimizer& inner,
                                             uint64_t sync_every, bool init_sync)
    : inner_(inner), sync_every_(sync_every) {
  check_argument(sync_every > 0, title, "sync_every must be > 0");
  for (const auto& each : inner.param_groups()) {
    for (const at::Tensor& parameter : each.params()) {
      if (parameter.requires_grad()) parameters_.push_back(parameter);
    }
  }
  check_argument(!parameters_.empty(), title, "no parameter requires a gradient");
  if (init_sync) broadcast(group, parameters_);
}

at::Tensor PeriodicSyncOptimizer::step(const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss = inner_.step(closure);
  ++steps_;
  maybe_sync();
  return loss;
}

void PeriodicSyncOptimizer::save(torch::serialize::OutputArchive& archive) {
  torch::serialize::OutputArchive state;
  inner_.save(state);
  archive.write("inner", state);
  archive.write("steps", at::IValue(static_cast<int64_t>(steps_)));
}

void PeriodicSyncOptimizer::load(torch::serialize::InputArchive& archive) {
  torch::serialize::InputArchive state;
  archive.read("inner", state);
  inner_.load(state);
  at::IValue steps;
  archive.read("steps", steps);
  steps_ = static_cast<uint64_t>(steps.toInt());
}

LocalSGD::LocalSGD(std::shared_ptr<Group> group, torch::optim::Optimizer& inner, const LocalSGDOptions& options)
    : PeriodicSyncOptimizer("LocalSGD", *group, inner, options.sync_every, options.init_sync),
      group_(std::move(group)),
      warmup_(options.warmup) {}

void LocalSGD::maybe_sync() {
  if (steps() <= warmup_ || steps() % sync_every() == 0) synchronize();
}

void LocalSGD::synchronize() { all_reduce(*group_, parameters(), ReduceOp::kAverage); }

}  // namespace muster::optim
