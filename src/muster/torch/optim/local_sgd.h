#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/optim/optimizer.h>

#include "muster/group/group.h"

namespace muster::optim {

struct LocalSGDOptions {
  uint64_t sync_every = 8;  ///< steps from one average to the next
  uint64_t warmup = 0;      ///< steps that are all followed by an average, in the beginning
  bool init_sync = true;    ///< all ranks begin with rank 0's parameters
};

/// Every rank makes steps of its own with any optimizer, and all average their parameters now and then (local SGD,
/// Stich 2019): 1 / sync_every of the bytes that gradients would be. State such as momentum is not averaged.
///
///   torch::optim::SGD inner(model->parameters(), 0.1);
///   muster::optim::LocalSGD optimizer(group, inner, {.sync_every = 8});
///   ... optimizer.zero_grad(); loss.backward(); optimizer.step();
///
/// All ranks make equally many steps. `inner` must live longer; learning rates are changed there. Not thread-safe.
/// Throws muster::ErrorException for failures, c10::ValueError for options that cannot be.
class LocalSGD {
 public:
  LocalSGD(std::shared_ptr<Group> group, torch::optim::Optimizer& inner, const LocalSGDOptions& options = {});

  /// One step of the inner optimizer; collective when an average is due.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);
  void zero_grad() { inner_.zero_grad(); }
  /// Collective: averages now, as after the last step.
  void synchronize();
  uint64_t steps() const { return steps_; }
  /// For a program that restores the state by itself.
  void set_steps(uint64_t steps) { steps_ = steps; }

  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  const std::shared_ptr<Group> group_;  // shared with whoever else uses it
  torch::optim::Optimizer& inner_;
  const LocalSGDOptions options_;
  std::vector<at::Tensor> parameters_;
  uint64_t steps_ = 0;
};

/// The parameters of an optimizer that have gradients. With `init_sync` all ranks' become rank 0's.
std::vector<at::Tensor> shared_parameters(Group& group, torch::optim::Optimizer& inner, bool init_sync);
/// What every outer optimizer's archive begins with: the inner optimizer's state, and the steps taken.
void save_inner(torch::serialize::OutputArchive& archive, torch::optim::Optimizer& inner, uint64_t steps);
/// Returns the steps taken.
uint64_t load_inner(torch::serialize::InputArchive& archive, torch::optim::Optimizer& inner);

}  // namespace muster::optim
