#include "muster/torch/reducer/reducer_unused.h"

#include <unordered_set>

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

}  // namespace muster
