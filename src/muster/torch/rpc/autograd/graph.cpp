#include "muster/torch/rpc/autograd/graph.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "muster/torch/exception.h"
#include "muster/torch/rpc/value.h"

namespace muster::rpc {

using ::torch::autograd::AccumulateGrad;

variable_list ReceivedNode::apply(variable_list&& /*gradients*/) {
  throw_error(Error{ErrorCode::kInvalidArgument,
                    "the loss depends on a tensor that worker \"" + from +
                        "\" has sent: call backward() of the context of muster.rpc, not of the tensor"});
}

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  if (!b.defined()) return a;
  return a.is_sparse() ? b + a : a + b;  // torch adds a sparse tensor to a dense one, but not the other way round
}

// ---- messages

Message write_gradients(const variable_list& gradients) {
  if (std::none_of(gradients.begin(), gradients.end(), [](const auto& each) { return each.defined(); })) return {};
  ValueWriter out;
  out.begin_list(gradients.size());
  for (at::Tensor gradient : gradients) {
    if (!gradient.defined()) {
      out.put_none();
      continue;
    }
    gradient = gradient.detach();
    // A received message has dense tensors, so its gradients are dense.
    out.put_tensor(gradient.layout() == c10::kStrided ? gradient : gradient.to_dense());
  }
  return out.take();
}

variable_list read_gradients(const Message& message) {
  variable_list gradients;
  if (message.head.empty()) return gradients;
  ValueReader in(message);
  in.expect(Tag::kList);
  for (size_t left = in.count(); left > 0; --left) {
    if (in.peek() == Tag::kNone) {
      (void)in.next();
      gradients.emplace_back();
    } else {
      in.expect(Tag::kTensor);
      gradients.push_back(in.tensor_value());
    }
  }
  in.finish();
  return gradients;
}

// ---- the graph

TorchGraph::TorchGraph(std::vector<std::pair<Edge, at::Tensor>> roots, std::map<MessageId, edge_list> sent,
                       const std::map<MessageId, NodePtr>& received, Options options)
    : options_(std::move(options)), roots_(std::move(roots)), sent_(std::move(sent)) {
  std::vector<Node*> nodes;
  for (const auto& [edge, gradient] : roots_) nodes.push_back(edge.function.get());
  for (const auto& [message, edges] : sent_) {
    for (const Edge& edge : edges) nodes.push_back(edge.function.get());
  }
  count(std::move(nodes));
  for (const auto& [message, node] : received) {
    if (node && states_.contains(node.get())) {
      received_.emplace(node.get(), message);
    } else {
      answers_.push_back({message, {}});  // no message or loss of this worker depends on it
    }
  }
}

void TorchGraph::count(std::vector<Node*> roots) {
  while (!roots.empty()) {
    Node* const node = roots.back();
    roots.pop_back();
    State& state = states_[node];
    if (++state.missing > 1) continue;
    state.inputs.resize(node->num_inputs());
    for (const Edge& next : node->next_edges()) {
      if (next.is_valid()) roots.push_back(next.function.get());
    }
  }
}

void TorchGraph::deliver(const Edge& edge, at::Tensor gradient, bool has_run) {
  Node* const node = edge.function.get();
  State& state = states_.at(node);
  at::Tensor& input = state.inputs.at(edge.input_nr);
  input = sum_of(input, gradient);
  state.has_input = state.has_input || has_run;
  if (--state.missing == 0) ready_.push(node);
}

std::vector<LocalGraph::Gradients> TorchGraph::run(std::vector<Gradients> arrived) {
  const c10::AutoGradMode no_graph(false);
  if (!std::exchange(started_, true)) {
    for (const auto& [edge, gradient] : roots_) deliver(edge, gradient, true);
  }
  for (const Gradients& each : arrived) {
    const edge_list& edges = sent_.at(each.message);
    variable_list gradients = read_gradients(each.gradients);
    gradients.resize(std::max(gradients.size(), edges.size()));
    validate_outputs(edges, gradients, [&](const std::string& what) {
      return c10::str("the gradients of message ", each.message.sender, ".", each.message.number, ": ", what);
    });
    for (size_t i = 0; i < edges.size(); ++i) deliver(edges[i], gradients[i], gradients[i].defined());
  }
  while (!ready_.empty()) {
    Node* const node = ready_.top();
    ready_.pop();
    run_node(*node, std::move(states_.extract(node).mapped()));
  }
  return std::exchange(answers_, {});
}

/// As torch's engine does: hooks of tensors, hooks of the node, the node, and its hooks after it.
void TorchGraph::run_node(Node& node, State state) {
  if (const auto received = received_.find(&node); received != received_.end()) {
    answers_.push_back({received->second, state.has_input ? write_gradients(state.inputs) : Message{}});
    return;
  }
  if (!state.has_input) {
    for (const Edge& next : node.next_edges()) {
      if (next.is_valid()) deliver(next, {}, false);
    }
    return;
  }
  variable_list inputs = std::move(state.inputs);
  if (dynamic_cast<AccumulateGrad*>(&node) != nullptr) return add_to_leaf(node, std::move(inputs));
  for (const auto& hook : node.tensor_pre_hooks()) inputs = (*hook)(inputs);
  for (const auto& [output, hook] : node.retains_grad_hooks()) inputs = (*hook)(inputs);
  for (const auto& hook : node.pre_hooks()) inputs = (*hook)(inputs);
  if (!options_.retain_graph) node.will_release_variables();
  const variable_list given = node.post_hooks().empty() ? variable_list() : inputs;
  variable_list outputs = node(std::move(inputs));
  validate_outputs(node.next_edges(), outputs,
                   [&](const std::string& what) { return c10::str("Function ", node.name(), " returned ", what); });
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, given);
  if (!options_.retain_graph) node.release_variables();
  for (size_t i = 0; i < node.num_outputs(); ++i) {
    if (node.next_edge(i).is_valid()) deliver(node.next_edge(i), outputs.at(i), true);
  }
}

/// A leaf's hooks after the gradient belong to DDP and the like. They may only run inside of torch's engine, so these
/// leaves wait for finish().
void TorchGraph::add_to_leaf(Node& leaf, variable_list gradients) {
  auto& accumulate = static_cast<AccumulateGrad&>(leaf);
  if (!leaf.post_hooks().empty() || accumulate.tensor_post_acc_grad_hooks() != nullptr) {
    hooked_leaves_.emplace_back(Edge(leaf.getptr(), 0), std::move(gradients.at(0)));
    return;
  }
  for (const auto& hook : leaf.tensor_pre_hooks()) gradients = (*hook)(gradients);
  for (const auto& hook : leaf.pre_hooks()) gradients = (*hook)(gradients);
  if (gradients.at(0).defined()) options_.add_gradient({accumulate.variable, std::move(gradients[0])});
}

void TorchGraph::finish() {
  if (hooked_leaves_.empty()) return;
  edge_list edges;
  variable_list gradients;
  std::vector<LeafGradient> before;
  for (auto& [edge, gradient] : std::exchange(hooked_leaves_, {})) {
    const at::Tensor& leaf = static_cast<AccumulateGrad&>(*edge.function).variable;
    before.push_back({leaf, leaf.grad()});
    leaf.mutable_grad() = at::Tensor();
    edges.push_back(edge);
    gradients.push_back(std::move(gradient));
  }
  ::torch::autograd::Engine::get_default_engine().execute(edges, gradients, /*keep_graph=*/true,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true);
  for (auto& [leaf, earlier] : before) {
    // A copy, because DDP may use the memory of the gradient in the next iteration.
    if (leaf.grad().defined()) options_.add_gradient({leaf, leaf.grad().clone()});
    leaf.mutable_grad() = earlier;
  }
}

}  // namespace muster::rpc
