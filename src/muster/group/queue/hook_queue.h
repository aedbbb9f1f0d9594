#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "muster/group/group.h"

namespace muster {

/// The hook that was set when an operation was submitted, and the operation's times. The hook is a shared_ptr, because
/// the group's hook may be replaced before the operation ends.
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
  /// Replaces the hook. Returns the previous hook, which must be destroyed without the mutex: the destructor of an
  /// object that it owns may call the group.
  [[nodiscard]] std::shared_ptr<const CompletionHook> set(CompletionHook hook);
  bool has_hook() const { return hook_ != nullptr; }
  /// Makes the HookCall of an operation that is submitted now.
  HookCall begin() const;

  /// Called when an operation has ended. The next run() calls its hook.
  void complete(HookCall&& call, const Call& operation, const Result<>& result);
  /// Calls the pending hooks, unless another thread does so now. Releases the lock during each hook, and notifies
  /// `changed` after it.
  void run(std::unique_lock<std::mutex>& lock, std::condition_variable& changed);

  /// True if there are hooks that were not called yet.
  bool pending() const { return !pending_.empty(); }
  bool running() const { return running_; }
  /// The number of operations that have ended and whose hooks have not returned.
  size_t size() const { return pending_.size() + (running_ ? 1 : 0); }
  /// The sequence number of the last operation whose hook has returned, or that had no hook.
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
