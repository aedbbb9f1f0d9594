#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "muster/torch/hooks.h"
#include "muster/torch/optim/local_sgd.h"

namespace muster::optim {

/// Makes the outer optimizer of a list of parameters.
using MakeOuter = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
/// SGD with the paper's learning rate of 0.7 and Nesterov momentum of 0.9.
std::unique_ptr<torch::optim::Optimizer> nesterov_outer(std::vector<at::Tensor> parameters);

struct DiLoCoOptions {
  uint64_t sync_every = 100;  ///< steps from one outer step to the next
  MakeOuter outer = nesterov_outer;
  /// Splits the model into this many parts, which are averaged at times spread over sync_every steps, so that fewer
  /// bytes are sent at a time (Streaming DiLoCo, Douillard et al. 2025).
  uint64_t fragments = 1;
  uint64_t delay = 0;  ///< steps that a rank makes while a part is averaged; less than sync_every
  /// The share of its own parameters that a rank keeps when the averages replace them. The default is 0, or 0.5 with a
  /// delay, because the steps made during the delay are only in its own parameters.
  std::optional<double> merge_alpha;
  bool init_sync = true;  ///< all ranks begin with the parameters of rank 0
};

/// Each rank makes `sync_every` steps of its own. The average distance that the ranks have moved is then the gradient
/// of an outer optimizer, and all ranks continue from its parameters (DiLoCo, Douillard et al. 2023).
///
///   torch::optim::AdamW inner(model->parameters(), 4e-4);
///   muster::optim::DiLoCo optimizer(group, inner, {.sync_every = 100},
///                                   muster::half_compress_hook({group}, at::kBFloat16));
///
/// Each rank keeps a copy of the parameters (float32, or float64 for float64 ones) and of the outer state.
class DiLoCo : public PeriodicSyncOptimizer {
 public:
  /// `hook` reduces the averages (torch/hooks.h). Null sends them uncompressed.
  DiLoCo(std::shared_ptr<Group> group, torch::optim::Optimizer& inner, const DiLoCoOptions& options = {},
         Hook hook = nullptr);
  ~DiLoCo() override;

  /// Makes an outer step of all parameters.
  void synchronize() override;
  /// Waits for pending averages, and applies them. Collective: call it after the same step at all ranks.
  void finish();
  /// Both call finish() first.
  void save(torch::serialize::OutputArchive& archive) override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  class Fragment;
  void maybe_sync() override;

  const uint64_t delay_;
  const double merge_alpha_;
  Hook hook_;
  std::vector<std::unique_ptr<Fragment>> fragments_;
};

}  // namespace muster::optim
