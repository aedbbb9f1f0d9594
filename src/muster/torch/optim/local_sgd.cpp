#include "muster/torch/optim/local_sgd.h"

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/collectives.h"

namespace muster::optim {

std::vector<at::Tensor> shared_parameters(Group& group, torch::optim::Optimizer& inner, bool init_sync) {
  std::vector<at::Tensor> parameters;
  for (const auto& each : inner.param_groups()) {
    for (const at::Tensor& parameter : each.params()) {
      if (parameter.requires_grad()) parameters.push_back(parameter);
    }
  }
  check_argument(!parameters.empty(), "outer optimizer", "no parameter requires a gradient");
  if (init_sync) broadcast(group, parameters);
  return parameters;
}

void save_inner(torch::serialize::OutputArchive& archive, torch::optim::Optimizer& inner, uint64_t steps) {
  torch::serialize::OutputArchive state;
  inner.save(state);
  archive.write("inner", state);
  archive.write("steps", at::IValue(static_cast<int64_t>(steps)));
}

uint64_t load_inner(torch::serialize::InputArchive& archive, torch::optim::Optimizer& inner) {
  torch::serialize::InputArchive state;
  archive.read("inner", state);
  inner.load(state);
  at::IValue steps;
  archive.read("steps", steps);
  return static_cast<uint64_t>(steps.toInt());
}

LocalSGD::LocalSGD(std::shared_ptr<Group> group, torch::optim::Optimizer& inner, const LocalSGDOptions& options)
    : group_(std::move(group)), inner_(inner), options_(options) {
  check_argument(options.sync_every > 0, "LocalSGD", "sync_every must be positive");
  parameters_ = shared_parameters(*group_, inner_, options.init_sync);
}

at::Tensor LocalSGD::step(const torch::optim::Optimizer::LossClosure& closure) {
  at::Tensor loss = inner_.step(closure);
  ++steps_;
  if (steps_ <= options_.warmup || steps_ % options_.sync_every == 0) synchronize();
  return loss;
}

void LocalSGD::synchronize() { all_reduce(*group_, parameters_, ReduceOp::kAverage); }

void LocalSGD::save(torch::serialize::OutputArchive& archive) const { save_inner(archive, inner_, steps_); }

void LocalSGD::load(torch::serialize::InputArchive& archive) { steps_ = load_inner(archive, inner_); }

}  // namespace muster::optim
