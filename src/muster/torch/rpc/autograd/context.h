#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/base/clock.h"
#include "muster/torch/rpc/autograd/graph.h"
#include "muster/torch/rpc/autograd/pass_runner.h"

namespace muster::rpc {

/// At the head of each message that is sent in a context, also of those without tensors.
struct ContextRecord {
  int64_t context = 0;
  MessageId message;
  std::string sender;
  uint32_t tensors = 0;  ///< those of the message that have gradients
};

/// What one worker knows of a forward pass: the messages that it has sent and received, the gradients of its
/// parameters, and the backward pass that runs now. Each worker that a call of the context reaches has one, with the
/// same id. Thread-safe.
class AutogradContext : public std::enable_shared_from_this<AutogradContext> {
 public:
  /// The id has the worker that has created the context in its upper half.
  AutogradContext(int64_t id, WorkerInfo self) : id_(id), self_(std::move(self)) {}
  int64_t id() const { return id_; }
  int creator() const { return static_cast<int>(id_ >> 32); }

  // The forward pass.

  /// The record of a new message.
  ContextRecord new_message();
  /// A message goes to this worker. `edges`: where the gradients of its tensors go; may be empty.
  void add_sent(const MessageId& message, const std::string& to, edge_list edges);
  /// A message has arrived. May be called several times for one.
  void add_received(const ContextRecord& record);
  /// Makes a tensor part of the graph: it has arrived as the one with this index among those that have gradients.
  void set_history(const ContextRecord& record, size_t index, const at::Tensor& tensor);

  // The backward pass.

  /// Makes the part of this worker in a pass. kAlreadyExists if another pass runs. Returns the one that is there if it
  /// has this id.
  using Roots = std::vector<std::pair<Edge, at::Tensor>>;
  Result<std::shared_ptr<PassRunner>> begin_pass(const std::shared_ptr<Agent>& agent, PassRunner::Options options,
                                                 Roots roots);
  /// The pass that runs or has run last, or null.
  std::shared_ptr<PassRunner> pass() const;

  void add_gradient(const LeafGradient& gradient);
  /// The gradients of this worker's parameters. The tensors are shared.
  std::vector<LeafGradient> gradients() const;

  /// Other workers that the context has reached from here.
  std::set<std::string> peers() const;
  TimePoint last_used() const;
  void touch();

 private:
  const int64_t id_;
  const WorkerInfo self_;
  mutable std::mutex mutex_;  ///< guards the fields below
  std::map<MessageId, edge_list> sent_;
  std::map<MessageId, NodePtr> received_;
  BackwardPass::Peers sent_to_, received_from_;
  std::set<std::string> peers_;
  std::unordered_map<c10::TensorImpl*, LeafGradient> gradients_;
  std::shared_ptr<PassRunner> pass_;
  TimePoint last_used_ = steady_clock().now();
};
using ContextPtr = std::shared_ptr<AutogradContext>;

}  // namespace muster::rpc
