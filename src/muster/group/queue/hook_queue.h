#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "muster/group/group.h"

namespace muster {

/// The hook of one operation, as it was when the operation was submitted, and the operation's times. Shared, because
/// the group's hook may be replaced meanwhile.
struct HookCall {
  std::shared_ptr<const CompletionHook> hook;
  TimePoint submitted, started, ended;

  void stamp(TimePoint& time) const {
    if (hook) time = steady_clock().now();
  }
};

/// Calls completion hooks one after the other, in the order in which the operations ended. Guarded by the mutex of the
/// call queue.
class HookQueue {
 public:
  /// Returns the hook before, which must be destroyed without the mutex: what it owns may call back.
  [[nodiscard]] std::shared_ptr<const CompletionHook> set(CompletionHook hook);
  bool has_hook() const { return hook_ != nullptr; }
  /// For an operation that is submitted now.
  HookCall begin() const;

  /// An operation has ended: its hook is called by the next run().
  void complete(HookCall&& call, const Call& operation, const Result<>& result);
  /// Calls the pending hooks, unless another thread does. Releases the lock meanwhile; notifies `changed` after each.
  void run(std::unique_lock<std::mutex>& lock, std::condition_variable& changed);

  /// Hooks that were not called yet.
  bool pending() const { return !pending_.empty(); }
  bool running() const { return running_; }
  /// Operations that have ended, and whose hooks have not returned.
  size_t size() const { return pending_.size() + (running_ ? 1 : 0); }
  /// The last operation whose hook has returned, or that had none.
  uint64_t completed() const { return completed_; }

 private:
  struct Pending {
    HookCall call;
    Call operation;
    Result<> result;
  };

  std::shared_ptr<const CompletionHook> hook_;
  std::deque<Pending> pending_;
  bool running_ = false;
  uint64_t completed_ = 0;
};

}  // namespace muster
