#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/rpc/message.h"

namespace muster::rpc {

class Agent;

/// Why a call failed. `error` names the worker and the function. If the handler failed, `type` is the name of its
/// exception ("ValueError"), and `traceback` is that of the remote thread; both may be empty.
struct CallError {
  Error error;
  std::string type;
  std::string traceback;

  /// The error, then the traceback if there is one.
  std::string to_string() const;
};
using CallResult = tl::expected<Message, CallError>;

struct CallOptions {
  /// From the call to its result. The time for finding and connecting the worker counts.
  Duration timeout = std::chrono::seconds(60);
  /// The function may run more than once for this call. Then the call is sent again if its connection breaks, also to a
  /// worker that was started again under the same name. The function must be registered as idempotent, too.
  bool idempotent = false;
  /// An idempotent call waits for a worker that takes the name of one that is gone. If false, a call fails when its
  /// worker is gone, or when no worker has the name yet.
  bool waits_for_successor = true;
  /// No result is sent. The call ends when the function has been started.
  bool one_way = false;
  /// Agent::call() returns when the call has ended. A worker that sleeps answers sooner than to a later wait.
  bool waits = false;
};

/// A call whose result is pending. Shared by the futures of the caller and by the agent.
struct CallState {
  explicit CallState(std::shared_ptr<Agent> by) : agent(std::move(by)) {}

  bool done() const { return done_.load(std::memory_order_acquire); }
  /// Stores the result. Returns the callbacks, which the agent then runs without a lock. The first result counts.
  std::vector<std::function<void()>> finish(CallResult value);
  /// Only once done(): the result does not change any more, so it needs no lock.
  const CallResult& result() const { return *result_; }
  /// Returns false if the call has ended already; the callback is then not stored.
  bool add_callback(std::function<void()> callback);

  const std::shared_ptr<Agent> agent;  ///< drives the call; shared, because a future may outlive the user's agent

 private:
  std::mutex mutex_;  ///< guards the fields below until done_ is set
  std::optional<CallResult> result_;
  std::vector<std::function<void()>> callbacks_;
  std::atomic<bool> done_ = false;  ///< the release store publishes result_
};

/// The result of a call, now or later. All copies refer to the same call. Thread-safe.
class Future {
 public:
  explicit Future(std::shared_ptr<CallState> state) : state_(std::move(state)) {}

  bool done() const { return state_->done(); }
  /// Waits until the call has ended, which is at its timeout at the latest. The result lives as long as a future.
  const CallResult& wait() const;
  /// Waits until the call has ended or the deadline has passed. Returns done().
  bool wait_until(const Deadline& deadline) const;
  /// Calls back once the call has ended: at once in this thread if it has ended already, else on a thread of the agent,
  /// or on any thread that makes a call or waits for one. So a thread must not do that while it holds a lock that a
  /// callback takes. The callback must be short, and must not wait for a call or shut the agent down.
  void then(std::function<void(const CallResult&)> callback) const;
  /// Ends the call with kAborted, unless it has ended, and asks the worker to cancel it. A function that has started
  /// runs on, unless it checks Request::canceled().
  void cancel() const;

 private:
  std::shared_ptr<CallState> state_;
};

}  // namespace muster::rpc
