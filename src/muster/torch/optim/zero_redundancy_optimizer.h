#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include "muster/group/group.h"

namespace muster::optim {

/// Base class of ZeroRedundancyOptimizer, for any sharded optimizer.
class ShardedOptimizer : public torch::optim::Optimizer {
 public:
  /// Collective. Updates this rank's parameters, then all ranks exchange theirs: one all-gather for each dtype, from
  /// and into the parameters themselves.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Collective. Returns, at rank `dst`, a plain optimizer over all parameters with the state of all ranks, for
  /// torch::save(); null at the other ranks. It is a copy, which later steps do not change.
  std::unique_ptr<torch::optim::Optimizer> consolidate(Rank dst = 0);
  /// Loads the archive of a plain optimizer, such as that of consolidate(). Each rank keeps its share. All ranks must
  /// load the same archive.
  void load(torch::serialize::InputArchive& archive) override;
  /// Throws c10::ValueError, because no rank has the whole state: use muster::checkpoint::save().
  void save(torch::serialize::OutputArchive& archive) const override;

  /// Collective, before step(). Scales the gradients so that their joint norm is at most `max_norm`, and returns the
  /// norm before. Gradients must be the same at all ranks (DistributedDataParallel), because each rank reads and scales
  /// only those of its own parameters. Otherwise as torch::nn::utils::clip_grad_norm_.
  double clip_grad_norm_(double max_norm, double norm_type = 2, bool error_if_nonfinite = false);

  /// This rank's parameters, in the order of the groups.
  std::vector<at::Tensor> own_parameters();
  /// The optimizer of this rank's parameters, with their state. Each step overwrites its options by those of
  /// param_groups(): change them there, as torch's schedulers do.
  torch::optim::Optimizer& local() { return *local_; }

 protected:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Groups)>;
  ShardedOptimizer(std::shared_ptr<Group> group, Groups groups,
                   std::unique_ptr<torch::optim::OptimizerOptions> defaults, Make make);

 private:
  void assign_new_parameters();
  void copy_options();
  void exchange_parameters();
  Groups groups_of(Rank rank) const;

  std::shared_ptr<Group> group_;  // shared with its other users
  Make make_;
  std::vector<std::vector<Rank>> owners_;  ///< by group of parameters, by parameter
  std::vector<size_t> loads_;              ///< bytes of parameters, by rank
  std::unique_ptr<torch::optim::Optimizer> local_;
};

/// An optimizer whose state is sharded over the ranks: each rank keeps the state of its share of the parameters,
/// updates them, and gets the others from their owners (ZeRO, Rajbhandari et al. 2020, section 5.1). The parameters
/// after a step are those that `Plain` alone would give.
///
///   muster::optim::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(group, model->parameters(),
///                                                                         torch::optim::AdamWOptions(1e-3));
///
/// `Plain` is any optimizer of torch that treats each parameter by itself, or a user's optimizer with a constructor
/// from (std::vector<OptimizerParamGroup>, Options). Change learning rates and other options in param_groups(), in the
/// same way at all ranks. The next step assigns groups and parameters that were added later. All ranks must construct
/// it with the same parameters, on the CPU. Not thread-safe. Failures throw muster::ErrorException.
template <class Plain>
class ZeroRedundancyOptimizer : public ShardedOptimizer {
  static_assert(!std::is_base_of_v<torch::optim::LBFGS, Plain>, "L-BFGS needs all parameters at once");

 public:
  template <class Options>
  ZeroRedundancyOptimizer(std::shared_ptr<Group> group, std::vector<torch::optim::OptimizerParamGroup> groups,
                          Options options)
      : ShardedOptimizer(std::move(group), std::move(groups), std::make_unique<Options>(options),
                         [options](Groups own) { return std::make_unique<Plain>(std::move(own), options); }) {}
  template <class Options>
  ZeroRedundancyOptimizer(std::shared_ptr<Group> group, std::vector<at::Tensor> parameters, Options options)
      : ZeroRedundancyOptimizer(std::move(group), Groups{torch::optim::OptimizerParamGroup(std::move(parameters))},
                                std::move(options)) {}
};

}  // namespace muster::optim
