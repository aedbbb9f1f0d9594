#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torch/optim/optimizer.h>

#include "muster/torch/hooks.h"

namespace muster::optim {

/// Makes the outer optimizer of some parameters.
using MakeOuter = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
/// SGD with the paper's learning rate of 0.7 and Nesterov momentum of 0.9.
std::unique_ptr<torch::optim::Optimizer> nesterov_outer(std::vector<at::Tensor> parameters);

struct DiLoCoOptions {
  uint64_t sync_every = 100;  ///< steps from one outer step to the next
  MakeOuter outer = nesterov_outer;
  /// The model is averaged in that many parts, at times spread over sync_every steps (Streaming DiLoCo, Douillard et
  /// al. 2025), so that the most bytes at a time are a part of the model's.
  uint64_t fragments = 1;
  uint64_t delay = 0;  ///< steps that go on while a part is averaged; less than sync_every
  /// What share of its own parameters a rank keeps when they are replaced. By default 0, or with a delay 0.5, as the
  /// steps of the meantime are in the own ones only.
  std::optional<double> mixing;
  bool init_sync = true;  ///< all ranks begin with rank 0's parameters
};

/// Every rank makes `sync_every` steps of its own; how far all have come from where they began, averaged, then is the
/// gradient of an outer optimizer, whose parameters all ranks go on from (DiLoCo, Douillard et al. 2023).
///
///   torch::optim::AdamW inner(model->parameters(), 4e-4);
///   muster::optim::DiLoCo optimizer(group, inner, {.sync_every = 100}, muster::half_hook({group}, at::kBFloat16));
///
/// Keeps a copy of the parameters (float32, float64 for such) and the outer state at every rank. All ranks make equally
/// many steps. `inner` must live longer; its options are changed there. Not thread-safe. Throws muster::ErrorException
/// for failures, c10::ValueError for options that cannot be.
class DiLoCo {
 public:
  /// `hook` says how averages are sent (torch/hooks.h); null: as they are.
  DiLoCo(std::shared_ptr<Group> group, torch::optim::Optimizer& inner, const DiLoCoOptions& options = {},
         Hook hook = nullptr);
  ~DiLoCo();

  /// One step of the inner optimizer; collective when a fragment's turn comes.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);
  void zero_grad() { inner_.zero_grad(); }
  /// Collective: an outer step of all parameters now; after it all ranks' are the same. For the end of training.
  void synchronize();
  /// Waits for averages that are in flight, and uses them. Collective, after the same step at all ranks.
  void finish();
  uint64_t steps() const { return steps_; }
  /// For a program that restores the state by itself.
  void set_steps(uint64_t steps) { steps_ = steps; }

  /// Averages on their way are waited for and used first, so all ranks must call it after the same step. The model's
  /// parameters are not part of it.
  void save(torch::serialize::OutputArchive& archive);
  void load(torch::serialize::InputArchive& archive);

 private:
  class Fragment;

  torch::optim::Optimizer& inner_;
  const DiLoCoOptions options_;
  const double mixing_;
  Hook hook_;
  std::vector<std::unique_ptr<Fragment>> fragments_;
  uint64_t steps_ = 0;
};

}  // namespace muster::optim
