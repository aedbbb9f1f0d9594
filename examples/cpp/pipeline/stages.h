// The stages of the model, and what runs the actions of one rank on them.
#pragma once

#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "../transformer.h"
#include "schedules.h"
#include "transports.h"

inline constexpr int64_t kContext = 64;  // characters that the model looks back on
inline constexpr int64_t kWidth = 128, kHeads = 4, kLayers = 8;

/// Functions that add the gradients of parameters.
using DeferredGradients = std::vector<std::function<void()>>;

/// If `later` is set, backward passes append a function to it that adds the gradients of the parameters.
struct DeferrableLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& input);
  DeferredGradients* later = nullptr;
};
TORCH_MODULE(DeferrableLinear);

/// A linear layer that leaves the gradients of its parameters to `later`.
struct ApplyDeferred : torch::autograd::Function<ApplyDeferred> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& input, int64_t layer) {
    ctx->save_for_backward({input});
    ctx->saved_data["layer"] = layer;
    return torch::linear(input, layer_at(layer).weight, layer_at(layer).bias);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    auto& layer = layer_at(ctx->saved_data["layer"].toInt());
    const auto input = ctx->get_saved_variables()[0].flatten(0, -2), gradient = gradients[0];
    layer.later->push_back([&layer, input, rows = gradient.flatten(0, -2)] {
      const torch::NoGradGuard no_gradients;
      add(layer.weight, rows.t().mm(input));
      add(layer.bias, rows.sum(0));
    });
    return {gradient.matmul(layer.weight), {}};
  }

  static DeferrableLinearImpl& layer_at(int64_t address) { return *reinterpret_cast<DeferrableLinearImpl*>(address); }
  static void add(torch::Tensor& parameter, const torch::Tensor& gradient) {
    auto& sum = parameter.mutable_grad();
    sum = sum.defined() ? sum.add_(gradient) : gradient;
  }
};

inline torch::Tensor DeferrableLinearImpl::forward(const torch::Tensor& input) {
  if (later == nullptr) return torch::nn::LinearImpl::forward(input);
  return ApplyDeferred::apply(input, reinterpret_cast<int64_t>(this));
}

/// A stage: some of the blocks, and the embedding or the scores. A layer begins with the same weights in whichever
/// stage it is.
inline torch::nn::Sequential make_stage(int64_t stage, int64_t stages, int64_t alphabet) {
  namespace nn = torch::nn;
  nn::Sequential layers;
  for (int64_t number = stage * kLayers / stages; number < (stage + 1) * kLayers / stages; ++number) {
    torch::manual_seed(static_cast<uint64_t>(number));
    if (number == 0) layers->push_back(Embedding(alphabet, kContext, kWidth));
    layers->push_back(std::make_shared<BlockImpl<DeferrableLinear>>(kWidth, kHeads));
    if (number == kLayers - 1) {
      layers->push_back(nn::LayerNorm(nn::LayerNormOptions({kWidth})));
      layers->push_back(DeferrableLinear(kWidth, alphabet));
    }
  }
  return layers;
}

/// Seconds since the step began.
struct Times {
  double start = 0, end = 0;
};

/// The stages of one rank. Gradients go to the parameters, as those of the mean loss of all microbatches.
class Runner {
 public:
  Runner(const Schedule& schedule, int64_t rank, int64_t alphabet, Transport& transport)
      : schedule_(schedule), order_(schedule.orders[static_cast<size_t>(rank)]), transport_(transport) {
    for (int64_t stage = rank; stage < schedule.stages; stage += schedule.ranks()) {
      stages_.emplace(stage, make_stage(stage, schedule.stages, alphabet));
    }
  }

  std::vector<torch::Tensor> parameters() const {
    std::vector<torch::Tensor> all;
    for (const auto& [number, stage] : stages_) {
      for (const auto& parameter : stage->parameters()) all.push_back(parameter);
    }
    return all;
  }
  /// The loss of the last step. 0 except on the rank of the last stage.
  double loss() const { return loss_; }

  /// Runs the passes of int64[pieces, kContext + 1]. Returns the times of this rank's actions. Time that is not in an
  /// action is spent waiting.
  std::vector<Times> step(const torch::Tensor& rows) {
    const auto begun = std::chrono::steady_clock::now();
    const auto now = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(); };
    loss_ = 0;
    const auto microbatches = rows.chunk(schedule_.microbatches);
    for (const Action& action : order_) {
      const auto needed = schedule_.needed_by(action);
      if (needed) transport_.expect(rank_of(needed->stage), *needed, {microbatches[0].size(0), kContext, kWidth});
    }
    std::vector<Times> times;
    for (const Action& action : order_) {
      const auto needed = schedule_.needed_by(action);
      const auto arrived = needed ? transport_.receive(*needed) : torch::Tensor();
      const double start = now();
      const auto result = run(action, arrived, microbatches[static_cast<size_t>(action.microbatch)]);
      times.push_back({start, now()});
      if (!result.defined()) continue;
      transport_.send(rank_of(action.stage + (action.pass == Pass::kForward ? 1 : -1)), action, result);
    }
    transport_.finish();
    return times;
  }

 private:
  using Key = std::pair<int64_t, int64_t>;  ///< stage and microbatch

  int64_t rank_of(int64_t stage) const { return stage % schedule_.ranks(); }

  /// Returns what the next or the previous stage needs.
  torch::Tensor run(const Action& action, const torch::Tensor& arrived, const torch::Tensor& rows) {
    const Key key{action.stage, action.microbatch};
    if (action.pass == Pass::kForward) return forward(key, arrived, rows);
    if (action.pass == Pass::kBackward) return backward(key, arrived);
    const auto weights = weights_.extract(key);
    for (const auto& add_gradients : weights.mapped()) add_gradients();
    return {};
  }

  torch::Tensor forward(const Key& key, torch::Tensor arrived, const torch::Tensor& rows) {
    // Deferred layers take part in the graph only through their input.
    const auto input = arrived.defined() ? arrived.requires_grad_() : rows.narrow(1, 0, kContext);
    collect_weights(key);
    auto output = stages_.at(key.first)->forward(input);
    const bool is_last = key.first == schedule_.stages - 1;
    if (is_last) {
      output = loss_of(output, rows.narrow(1, 1, kContext)) / schedule_.microbatches;
      loss_ += output.item<double>();
    }
    activations_.emplace(key, std::pair(input, output));
    return is_last ? torch::Tensor() : output.detach();
  }

  torch::Tensor backward(const Key& key, const torch::Tensor& arrived) {
    const auto [input, output] = activations_.extract(key).mapped();
    collect_weights(key);
    output.backward(arrived);
    return input.grad();
  }

  /// The next passes leave the gradients of the weights to an action.
  void collect_weights(const Key& key) {
    if (!schedule_.splits_backward()) return;
    for (const auto& module : stages_.at(key.first)->modules()) {
      if (auto* layer = module->as<DeferrableLinear>()) layer->later = &weights_[key];
    }
  }

  const Schedule& schedule_;
  const Actions& order_;
  Transport& transport_;
  std::map<int64_t, torch::nn::Sequential> stages_;
  std::map<Key, std::pair<torch::Tensor, torch::Tensor>> activations_;  ///< input and output
  std::map<Key, DeferredGradients> weights_;                            ///< gradients that are not computed yet
  double loss_ = 0;
};
