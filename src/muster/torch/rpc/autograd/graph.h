#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/rpc/backward_pass.h"

namespace muster::rpc {

using ::torch::autograd::Edge;
using ::torch::autograd::edge_list;
using ::torch::autograd::Node;
using ::torch::autograd::variable_list;
/// A shared_ptr or an intrusive_ptr, depending on the release of torch.
using NodePtr = decltype(Edge::function);

template <class T, class... Args>
NodePtr make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

/// Stands for a message that was received: its inputs are the gradients of the message's tensors.
struct ReceivedNode final : Node {
  explicit ReceivedNode(std::string from) : from(std::move(from)) {}
  std::string name() const override { return "muster::rpc::Received"; }
  /// Called by torch's own engine only.
  variable_list apply(variable_list&& gradients) override;
  const std::string from;
};

/// A leaf of the graph and its gradient.
struct LeafGradient {
  at::Tensor leaf;
  at::Tensor gradient;
};

/// Adds two gradients, of which one may be sparse. Undefined ones count as zero.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b);

/// Runs the nodes of torch's graph as gradients for them arrive. torch's engine cannot do this: it runs a graph in one
/// go, from gradients that are all known. A node runs once, when all gradients that can reach it are known.
class TorchGraph final : public LocalGraph {
 public:
  struct Options {
    bool retain_graph = false;
    /// Gets the gradients of leaves. Called without a lock.
    std::function<void(LeafGradient)> add_gradient;
  };
  /// `roots`: tensors of this worker, and their gradients. `sent`: where the gradients of messages go, one edge for
  /// each of their tensors.
  TorchGraph(std::vector<std::pair<Edge, at::Tensor>> roots, std::map<MessageId, edge_list> sent,
             const std::map<MessageId, NodePtr>& received, Options options);

  // LocalGraph
  std::vector<Gradients> run(std::vector<Gradients> arrived) override;
  void finish() override;

 private:
  struct State {
    int missing = 0;         ///< edges to the node that have not delivered yet
    bool has_input = false;  ///< an edge that delivered comes from a node that has run
    variable_list inputs;
  };
  struct ByAge {
    bool operator()(Node* a, Node* b) const { return a->sequence_nr() < b->sequence_nr(); }
  };

  void count(std::vector<Node*> roots);
  void deliver(const Edge& edge, at::Tensor gradient, bool has_run);
  void run_node(Node& node, State state);
  void add_to_leaf(Node& leaf, variable_list gradients);

  const Options options_;
  const std::vector<std::pair<Edge, at::Tensor>> roots_;  ///< keeps the nodes alive, as the next one does
  const std::map<MessageId, edge_list> sent_;
  bool started_ = false;
  std::unordered_map<Node*, MessageId> received_;
  std::vector<Gradients> answers_;  ///< of received messages, not yet returned
  std::unordered_map<Node*, State> states_;
  std::priority_queue<Node*, std::vector<Node*>, ByAge> ready_;
  std::vector<std::pair<Edge, at::Tensor>> hooked_leaves_;  ///< whose hooks need torch's engine
};

/// The gradients of one message: a list of tensors, or None for each that has none. Empty if none has one.
Message write_gradients(const variable_list& gradients);
variable_list read_gradients(const Message& message);

}  // namespace muster::rpc
