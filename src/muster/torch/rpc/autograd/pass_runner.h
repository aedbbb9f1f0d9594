#pragma once

#include <atomic>
#include <compare>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "muster/rpc/agent.h"
#include "muster/rpc/backward_pass.h"

namespace muster::rpc {

struct PassId {
  int initiator = -1;
  uint64_t number = 0;

  auto operator<=>(const PassId&) const = default;
};

/// The functions of workers that take part in a pass. pass_wire.h has their arguments.
inline constexpr const char* kPassPart = "muster.autograd.part";
inline constexpr const char* kPassAbort = "muster.autograd.abort";

/// Runs the part of this worker in one backward pass: gives the graph what arrives, and sends what comes out of it. The
/// first failure ends the pass at all workers. Thread-safe. Must be held by a shared_ptr.
class PassRunner : public std::enable_shared_from_this<PassRunner> {
 public:
  struct Options {
    int64_t context = 0;
    PassId id;
    bool retain_graph = false;
    Deadline deadline = Deadline::never();
    /// Makes the error of a call of the current exception.
    CallError (*describe)() = nullptr;
  };
  PassRunner(std::shared_ptr<Agent> agent, const Options& options, std::unique_ptr<BackwardPass> pass);

  const PassId& id() const { return options_.id; }
  bool has_ended() const;

  /// At the worker that has begun the pass: runs what can run.
  void start();
  /// There: waits until the pass has ended at all workers, or until `until`. Returns has_ended().
  bool wait_until(const Deadline& until);
  /// There, once the pass has ended: throws what made it fail.
  void check() const;

  /// A part has arrived. Replies when the protocol wants it. At the worker that has begun the pass this only queues the
  /// part for wait_until(), so it is short.
  void receive(const Request& request, Responder responder, std::optional<LocalGraph::Gradients> answer,
               const std::vector<MessageId>& expected);
  /// BackwardPass::add_late(), unless the pass has ended.
  void add_late(const MessageId& message, const std::string& from);
  /// Ends the pass at all workers, unless it has ended.
  void fail(CallError why);
  /// Looks for a deadline that has passed, for the end of the worker that waits for this one, and asks for answers that
  /// have been missing for a while. To be called now and then.
  void look_after();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Engagement {
    Request request;  ///< without the arguments
    Responder responder;
  };
  bool begins_here() const { return options_.id.initiator == agent_->self().id; }
  void advance(Lock& lock);
  bool step(Lock& lock);
  Message message_of(BackwardPass::Part part) const;
  void send(BackwardPass::Part part);
  void on_acknowledged(const std::string& by, const CallResult& result);
  /// All that is left is a part for the worker that made this one take part.
  bool only_owes_reply() const { return engaged_by_ && pass_->only_owes(engaged_by_->request.from.name); }
  bool may_end() const { return phase_ == Phase::kAnswered && (pass_->is_ended() || only_owes_reply()); }
  void fail(Lock& lock, CallError why, std::exception_ptr thrown);
  void end(Lock& lock);

  const std::shared_ptr<Agent> agent_;
  const Options options_;
  /// wait_until() must look: a part has arrived, or the pass has ended. Set with the lock, read without it.
  std::atomic<bool> news_ = false;
  mutable std::mutex mutex_;  ///< guards the fields below
  std::unique_ptr<BackwardPass> pass_;
  std::optional<Engagement> engaged_by_;  ///< what made this worker take part; acknowledged when it has ended
  bool advancing_ = false;                ///< a thread is in advance()
  enum class Phase : uint8_t { kRunning, kAnswered, kFailed } phase_ = Phase::kRunning;
  std::optional<CallError> error_;
  std::exception_ptr thrown_;  ///< the error, if it was thrown here
  TimePoint moved_;            ///< when something has arrived last
};

}  // namespace muster::rpc
