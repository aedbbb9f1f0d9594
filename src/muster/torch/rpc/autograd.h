#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/rpc/agent.h"
#include "muster/torch/rpc/remote_error.h"

/// Distributed autograd: gradients flow back through remote calls.
namespace muster::rpc {

class AutogradContext;
using ContextPtr = std::shared_ptr<AutogradContext>;
class PassRunner;
struct PassPart;
class Worker;

struct BackwardOptions {
  /// Keep the graph, so that backward() can run again.
  bool retain_graph = false;
  Duration timeout = std::chrono::seconds(60);
};

/// The contexts of one worker, and its part in their backward passes. backward_pass.h explains the protocol.
/// Thread-safe. Most programs use AutogradScope.
class Autograd : public std::enable_shared_from_this<Autograd> {
 public:
  /// Makes the error of a call of the exception that is being handled.
  using Describe = CallError (*)();
  /// Adds the functions of the protocol to the agent. One for each agent. `describe`: for what a node throws.
  static Result<std::shared_ptr<Autograd>> start(std::shared_ptr<Agent> agent, Describe describe = current_call_error);
  ~Autograd();

  ContextPtr create();
  /// Throws ErrorException with kNotFound if the context has ended, or was never here.
  ContextPtr find(int64_t id) const;
  bool contains(int64_t id) const;
  /// The context of a call that has arrived; null if it has none. Throws as find() if this worker created the context,
  /// and it has ended.
  ContextPtr context_of(const Message& arguments);

  /// Starts a backward pass from `roots`, tensors with one element. For their gradient 1 is taken. All workers that the
  /// context has reached take part. Throws ArgumentException for roots without history, and ErrorException with
  /// kAlreadyExists while another pass of the context runs.
  std::shared_ptr<PassRunner> begin_backward(const ContextPtr& context, const std::vector<at::Tensor>& roots,
                                             const BackwardOptions& options);
  /// Ends a context at all workers.
  void release(const ContextPtr& context);

  /// Contexts that are here. For tests.
  size_t count() const;
  void stop();

 private:
  Autograd(std::shared_ptr<Agent> agent, Describe describe);
  Result<> add_functions();
  ContextPtr find_or_create(int64_t id);
  ContextPtr insert(int64_t id);
  void receive_part(const Request& request, Responder&& responder);
  void take_part(const Request& request, Responder&& responder, PassPart part);
  void receive_abort(const Request& request);
  void release(int64_t id, const std::string& except);
  void look_after();
  void drop_abandoned(const std::vector<ContextPtr>& idle);
  void run();

  const std::shared_ptr<Agent> agent_;
  const Describe describe_;
  const pid_t pid_;           ///< a forked child has neither the thread nor the calls of its parent
  mutable std::mutex mutex_;  ///< guards the fields below
  std::unordered_map<int64_t, ContextPtr> contexts_;
  uint32_t created_ = 0;
  uint64_t passes_ = 0;
  bool stopped_ = false;
  std::condition_variable changed_;
  std::thread thread_;  ///< looks after passes and contexts, once there is one
};

/// Waits for a pass that begin_backward() has started. False if it has not ended at the deadline. Throws what made it
/// fail.
bool wait_for_pass(PassRunner& pass, const Deadline& deadline);
/// Ends the pass at all workers.
void abort_pass(PassRunner& pass, const std::string& why);
/// The same at all workers.
int64_t context_id(const AutogradContext& context);
/// The parameters of this worker that have a gradient in the context, and their gradients.
std::vector<std::pair<at::Tensor, at::Tensor>> gradients_of(const AutogradContext& context);

/// Marks a context as the current one of this thread while the object lives: calls that the thread makes belong to it.
class CurrentContext {
 public:
  explicit CurrentContext(ContextPtr context) : outer_(std::exchange(current(), std::move(context))) {}
  ~CurrentContext() { current() = std::move(outer_); }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

  /// Null if there is none.
  static ContextPtr& current();

 private:
  ContextPtr outer_;
};

/// One step of training across workers. Calls that this thread makes while the object lives, and calls that their
/// functions make, are recorded. backward() then computes the gradients of the parameters that the losses depend on, at
/// the workers where they are. They are kept apart from the tensors' own gradients, so that several steps can run at
/// the same time. Each worker reads its own with gradients(), or hands them to a DistributedOptimizer.
///
///     rpc::AutogradScope scope(worker);
///     at::Tensor loss = worker.rpc_sync<at::Tensor>("ps", "forward", {}, input).sum();
///     scope.backward({loss});
///     optimizer.step(scope.id());
class AutogradScope {
 public:
  explicit AutogradScope(const Worker& worker);
  /// Ends the context at all workers.
  ~AutogradScope();
  AutogradScope(const AutogradScope&) = delete;

  /// The same at all workers.
  int64_t id() const;
  /// Waits until the pass has ended at all workers. Throws what a worker has thrown, ErrorException with kPeerLost if
  /// one was lost, or kTimeout. The pass has then ended everywhere, and the gradients may be incomplete.
  void backward(const std::vector<at::Tensor>& losses, const BackwardOptions& options = {}) const;
  /// The gradient of a parameter of this worker. Undefined if there is none.
  at::Tensor gradient(const at::Tensor& parameter) const;

 private:
  const std::shared_ptr<Autograd> autograd_;
  const ContextPtr context_;
  std::optional<CurrentContext> current_;
};

}  // namespace muster::rpc
