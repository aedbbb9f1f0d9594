#include "muster/torch/reducer/autograd_hooks.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <memory>
#include <unordered_set>
#include <utility>

namespace muster {
namespace {

using torch::autograd::utils::LambdaPostHook;

std::unique_ptr<LambdaPostHook> make_post_hook(std::function<void()> call) {
  using List = std::vector<at::Tensor>;
  return std::make_unique<LambdaPostHook>(
      [call = std::move(call)](const List& outputs, const List&) {
        call();
        return outputs;
      },
      [](auto&) {
        TORCH_CHECK(false,
                    "compiled autograd cannot trace the reducer's hooks; set "
                    "torch._dynamo.config.optimize_ddp = \"python_reducer\", or compile the forward only");
      });
}

}  // namespace

std::vector<size_t> find_unused(const std::vector<at::Tensor>& outputs, const std::vector<NodePtr>& accumulators) {
  using torch::autograd::Node;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> left;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) left.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    // gradient_edge(), not grad_fn(), because an output may be a parameter itself.
    if (output.defined() && output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!left.empty()) {
    const Node* node = left.back();
    left.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<size_t> unused;
  for (size_t i = 0; i < accumulators.size(); ++i) {
    if (!seen.contains(accumulators[i].get())) unused.push_back(i);
  }
  return unused;
}

void AutogradHooks::attach(const ReducerContext& context, const std::function<void(size_t)>& on_gradient) {
  for (size_t i = 0; i < context.parameters.size(); ++i) {
    NodePtr accumulator = torch::autograd::impl::grad_accumulator(context.parameters[i]);
    TORCH_CHECK(accumulator, "parameter ", context.name_of(i), " does not require a gradient, or is no leaf");
    TORCH_CHECK(std::find(accumulators_.begin(), accumulators_.end(), accumulator) == accumulators_.end(), "parameter ",
                context.name_of(i), " is given twice");
    accumulators_.push_back(std::move(accumulator));
  }
  for (size_t i = 0; i < accumulators_.size(); ++i) {
    keys_.push_back(accumulators_[i]->add_post_hook(make_post_hook([on_gradient, i] { on_gradient(i); })));
  }
}

void AutogradHooks::detach() {
  for (size_t i = 0; i < keys_.size(); ++i) accumulators_[i]->del_post_hook(keys_[i]);
  keys_.clear();
}

void AutogradHooks::check(const ReducerContext& context) const {
  for (size_t i = 0; i < accumulators_.size(); ++i) {
    TORCH_CHECK(torch::autograd::impl::try_get_grad_accumulator(context.parameters[i]) == accumulators_[i],
                "parameter ", context.name_of(i),
                " has another dtype or device than when it was wrapped, or was loaded by torch::load(): the reducer "
                "does not see its gradients any more. Make a new DistributedDataParallel after such a change");
  }
}

}  // namespace muster
