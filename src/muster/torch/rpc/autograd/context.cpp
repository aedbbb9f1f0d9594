#include "muster/torch/rpc/autograd/context.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <utility>

namespace muster::rpc {

ContextRecord AutogradContext::new_message() {
  static std::atomic<uint64_t> number = 0;
  return {id_, {self_.id, ++number}, self_.name, 0};
}

void AutogradContext::add_sent(const MessageId& message, const std::string& to, edge_list edges) {
  const std::lock_guard lock(mutex_);
  last_used_ = steady_clock().now();
  peers_.insert(to);
  if (edges.empty()) return;
  sent_to_[message] = to;
  sent_[message] = std::move(edges);
}

void AutogradContext::add_received(const ContextRecord& record) {
  std::shared_ptr<PassRunner> running;
  {
    const std::lock_guard lock(mutex_);
    last_used_ = steady_clock().now();
    peers_.insert(record.sender);
    if (record.tensors == 0 || received_.contains(record.message)) return;
    received_.emplace(record.message, make_node<ReceivedNode>(record.sender));
    received_from_[record.message] = record.sender;
    running = pass_;
  }
  if (running) running->add_late(record.message, record.sender);
}

void AutogradContext::set_history(const ContextRecord& record, size_t index, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const NodePtr& node = received_.at(record.message);
  if (index == node->num_inputs()) (void)node->add_input_metadata(tensor);  // else the message is read once more
  ::torch::autograd::impl::set_gradient_edge(tensor, Edge(node, static_cast<uint32_t>(index)));
}

Result<std::shared_ptr<PassRunner>> AutogradContext::begin_pass(const std::shared_ptr<Agent>& agent,
                                                                PassRunner::Options options, Roots roots) {
  std::shared_ptr<PassRunner> before;  // destroyed without the lock, because that may take the GIL
  const std::lock_guard lock(mutex_);
  last_used_ = steady_clock().now();
  if (pass_ && pass_->id() == options.id) return pass_;
  if (pass_ && !pass_->has_ended()) {
    return fail(ErrorCode::kAlreadyExists, "another backward pass of this context runs: wait for its end");
  }
  const auto add = [weak = weak_from_this()](const LeafGradient& gradient) {
    if (const auto alive = weak.lock()) alive->add_gradient(gradient);
  };
  auto graph =
      std::make_unique<TorchGraph>(std::move(roots), sent_, received_, TorchGraph::Options{options.retain_graph, add});
  options.context = id_;
  auto pass = std::make_unique<BackwardPass>(std::move(graph), sent_to_, received_from_);
  before = std::exchange(pass_, std::make_shared<PassRunner>(agent, options, std::move(pass)));
  return pass_;
}

std::shared_ptr<PassRunner> AutogradContext::pass() const {
  const std::lock_guard lock(mutex_);
  return pass_;
}

/// The gradient of a context is changed in place, for example to clip it. So it must not share its memory.
void AutogradContext::add_gradient(const LeafGradient& gradient) {
  const c10::AutoGradMode no_graph(false);
  at::Tensor own = gradient.gradient.detach();
  // References that are not shared: one to the gradient; to its memory, that of the gradient and that of `own`.
  const bool is_shared =
      gradient.gradient.use_count() > 1 ||
      (own.layout() == c10::kStrided && (own.storage().use_count() > 2 || !own.is_non_overlapping_and_dense()));
  if (is_shared) own = own.clone();
  at::Tensor before;  // destroyed without the lock, because that may take the GIL
  const std::lock_guard lock(mutex_);
  LeafGradient& sum = gradients_[gradient.leaf.unsafeGetTensorImpl()];
  sum.leaf = gradient.leaf;
  before = sum.gradient;
  sum.gradient = sum_of(before, own);
}

std::vector<LeafGradient> AutogradContext::gradients() const {
  const std::lock_guard lock(mutex_);
  std::vector<LeafGradient> gradients;
  for (const auto& [leaf, gradient] : gradients_) gradients.push_back(gradient);
  return gradients;
}

std::set<std::string> AutogradContext::peers() const {
  const std::lock_guard lock(mutex_);
  return peers_;
}

TimePoint AutogradContext::last_used() const {
  const std::lock_guard lock(mutex_);
  return last_used_;
}

void AutogradContext::touch() {
  const std::lock_guard lock(mutex_);
  last_used_ = steady_clock().now();
}

}  // namespace muster::rpc
