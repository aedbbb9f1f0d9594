#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torch/optim/optimizer.h>

#include "muster/group/group.h"

namespace muster::optim {

/// Base class of LocalSGD and DiLoCo: each rank makes steps of its own with an inner optimizer, and all ranks
/// synchronize their parameters every few steps. All ranks must make the same number of steps. The inner optimizer must
/// outlive this; change its options there. Not thread-safe. Throws muster::ErrorException for failures, c10::ValueError
/// for invalid options.
class PeriodicSyncOptimizer {
 public:
  virtual ~PeriodicSyncOptimizer() = default;
  PeriodicSyncOptimizer(const PeriodicSyncOptimizer&) = delete;
  PeriodicSyncOptimizer& operator=(const PeriodicSyncOptimizer&) = delete;

  /// Makes one step of the inner optimizer. Collective when a synchronization is due.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);
  void zero_grad() { inner_.zero_grad(); }
  /// Collective: synchronizes now, such as at the end of training. Afterwards all ranks have the same parameters.
  virtual void synchronize() = 0;
  uint64_t steps() const { return steps_; }
  /// For a program that restores the state without load().
  void set_steps(uint64_t steps) { steps_ = steps; }

  /// The state without the model's parameters. Call it at all ranks after the same step.
  virtual void save(torch::serialize::OutputArchive& archive);
  virtual void load(torch::serialize::InputArchive& archive);

 protected:
  /// With `init_sync` all ranks begin with the parameters of rank 0.
  PeriodicSyncOptimizer(const char* title, Group& group, torch::optim::Optimizer& inner, uint64_t sync_every,
                        bool init_sync);
  virtual void maybe_sync() = 0;
  /// The parameters of the inner optimizer that have gradients.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  uint64_t sync_every() const { return sync_every_; }

 private:
  torch::optim::Optimizer& inner_;
  const uint64_t sync_every_;
  std::vector<at::Tensor> parameters_;
  uint64_t steps_ = 0;
};

struct LocalSGDOptions {
  uint64_t sync_every = 8;  ///< steps from one average to the next
  uint64_t warmup = 0;      ///< number of first steps that are each followed by an average
  bool init_sync = true;    ///< all ranks begin with the parameters of rank 0
};

/// Each rank makes steps of its own with any optimizer, and all ranks average their parameters every `sync_every` steps
/// (local SGD, Stich 2019). This sends 1 / sync_every of the bytes of gradients. State such as momentum is not
/// averaged.
///
///   torch::optim::SGD inner(model->parameters(), 0.1);
///   muster::optim::LocalSGD optimizer(group, inner, {.sync_every = 8});
///   ... optimizer.zero_grad(); loss.backward(); optimizer.step();
class LocalSGD : public PeriodicSyncOptimizer {
 public:
  LocalSGD(std::shared_ptr<Group> group, torch::optim::Optimizer& inner, const LocalSGDOptions& options = {});
  void synchronize() override;

 private:
  void maybe_sync() override;

  const std::shared_ptr<Group> group_;  // shared with its other users
  const uint64_t warmup_;
};

}  // namespace muster::optim
