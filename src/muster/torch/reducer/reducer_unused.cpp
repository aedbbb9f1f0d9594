#include "muster/torch/reducer/reducer_unused.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_set>

#include "muster/torch/c10d/work.h"
#include "muster/torch/exception.h"
#include "muster/torch/tensor.h"

namespace muster {

std::vector<size_t> find_unused(const std::vector<at::Tensor>& outputs, const std::vector<NodePtr>& accumulators) {
  using torch::autograd::Node;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> left;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) left.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    // The edge, not grad_fn(): an output may be a parameter itself.
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

UsedParameters::UsedParameters(size_t count) : counts_(at::zeros({static_cast<int64_t>(count)}, at::kInt)) {}

void UsedParameters::set_unused(std::vector<size_t> unused) {
  has_changed_ = has_changed_ || (std::exchange(known_, true) && unused != unused_);
  unused_ = std::move(unused);
}

bool UsedParameters::all_unused(const std::vector<size_t>& parameters) const {
  return std::all_of(parameters.begin(), parameters.end(),
                     [this](size_t index) { return std::binary_search(unused_.begin(), unused_.end(), index); });
}

void UsedParameters::clear_counts() {
  counts_.zero_();
  reduced_ = false;
}

void UsedParameters::all_reduce_counts(Group& group) {
  const ProfilerEvent event("muster:all_reduce", counts_);
  value_or_throw(group.all_reduce(value_or_throw(view_of(counts_)), ReduceOp::kSum).wait());
  reduced_ = true;
}

void UsedParameters::reset() {
  clear_counts();
  unused_.clear();
  known_ = has_changed_ = false;
}

}  // namespace muster
