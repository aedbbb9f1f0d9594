#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "muster/rpc/call.h"

namespace muster::rpc {

/// A process that takes part in remote calls. Names are unique among the workers that are present. Ids are given in the
/// order of arrival and never used twice: a worker that is started again under its name has a new id.
struct WorkerInfo {
  std::string name;
  int id = -1;

  /// "worker "ps" (id 3)".
  std::string to_string() const;
};

/// A call as the function sees it.
struct Request {
  WorkerInfo from;
  std::string function;
  Message arguments;
  /// When the caller stops waiting, on this process's clock.
  Deadline deadline = Deadline::never();
  /// True once the caller has canceled the call, or is gone. Thread-safe.
  bool canceled() const { return canceled_ && canceled_->load(std::memory_order_relaxed); }

  /// For agents. Relaxed: it is a hint, and orders nothing.
  std::shared_ptr<const std::atomic<bool>> canceled_;
};

/// Sends the result of one call. May be kept and used later, by any thread. If it is dropped without a result, the
/// caller gets an error.
class Responder {
 public:
  /// What an agent keeps for a call that it runs.
  class Sink {
   public:
    virtual ~Sink() = default;
    virtual void finish(CallResult result) = 0;
  };

  explicit Responder(std::shared_ptr<Sink> sink) : sink_(std::move(sink)) {}
  Responder(Responder&&) noexcept = default;
  Responder& operator=(Responder&&) = delete;
  ~Responder();

  void reply(Message result) { finish(std::move(result)); }
  void fail(CallError why) { finish(tl::unexpected(std::move(why))); }
  /// The first result counts.
  void finish(CallResult result);

 private:
  std::shared_ptr<Sink> sink_;
};

/// Runs a call. It may block, also in its own calls, workers() and barrier(): other calls then run on other threads. It
/// must not throw.
using Handler = std::function<void(Request, Responder)>;

struct FunctionOptions {
  /// A call of this function may run twice (CallOptions::idempotent).
  bool idempotent = false;
  /// It runs on the thread that has read the request, which may be one that makes a call or waits for one. So it starts
  /// at once. But it must be short, must take no lock that such a thread may hold, and must not wait for a call.
  bool brief = false;
  /// It runs mostly under a lock that other such functions need, too, such as Python's GIL. One thread runs these
  /// functions as long as it makes progress, because others would wait for that lock.
  bool serial = false;
};

/// Calls functions of other workers, and runs functions for them. Thread-safe. Must be held by a shared_ptr.
///
/// A call runs at most once, unless it is idempotent. If a worker is lost, only calls to that worker fail.
///
/// Any thread may drop the last reference. The worker then leaves at once, and the functions that run are waited for.
/// In a function or a callback of this agent, another thread does this.
class Agent : public std::enable_shared_from_this<Agent> {
 public:
  virtual ~Agent() = default;

  virtual const WorkerInfo& self() const = 0;
  /// Makes a function callable. kAlreadyExists if there is one with this name, kInvalidArgument if it contains '#':
  /// what follows that in a call is a note for users (rpc/function_table.h).
  virtual Result<> add_function(const std::string& name, Handler handler, FunctionOptions options) = 0;
  /// Called for functions that were not added. At most one; kAlreadyExists for a second one.
  virtual Result<> add_fallback(Handler handler, FunctionOptions options) = 0;

  /// Calls `function` of the worker `to`, which may also be this worker. If no worker has this name, the call waits
  /// until one has joined. But if the worker that had it was connected to this one and left in order, the call fails at
  /// once with kPeerLost, unless it is idempotent. All errors are in the result.
  virtual Future call(const std::string& to, const std::string& function, Message arguments,
                      const CallOptions& options) = 0;
  /// Runs a function on a thread of the agent, as handlers run. Dropped if the agent has left.
  virtual void post(std::function<void()> function) = 0;
  /// The workers that are present, sorted by id.
  virtual Result<std::vector<WorkerInfo>> workers(const Deadline& deadline) = 0;
  /// Waits until `count` workers have called barrier() with this name.
  virtual Result<> barrier(const std::string& name, int count, const Deadline& deadline) = 0;

  /// Waits until `done()`, until this worker leaves, or until the deadline. It drives the links meanwhile, so a brief
  /// function may run here. `done` is called often and with a lock of the agent, so it must be cheap, as reading an
  /// atomic is. It is called again after each brief function and each call that ends.
  virtual void wait_until(const std::function<bool()>& done, const Deadline& deadline) = 0;
  /// Waits until all calls of this worker have ended.
  virtual Result<> wait_for_calls(const Deadline& deadline) = 0;
  /// Waits until the calls of this worker have ended and the functions that run here have replied, or until the
  /// deadline, and leaves. Calls that are left then fail with kAborted.
  ///
  /// kTimeout if calls were left, or if functions have not returned. The error then names them. They run on, and the
  /// agent lives until they return; another shutdown() waits for them again. What they use must live as long.
  /// kInvalidArgument in a handler or a callback of this agent, and in a forked child.
  virtual Result<> shutdown(const Deadline& deadline) = 0;

  // For Future.
  virtual void wait(CallState& state, const Deadline& deadline) = 0;
  virtual void cancel(CallState& state) = 0;
};

}  // namespace muster::rpc
