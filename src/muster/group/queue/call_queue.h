#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "muster/flight/recorder.h"
#include "muster/group/queue/execution_lock.h"
#include "muster/group/queue/hook_queue.h"
#include "muster/group/work_state.h"

namespace muster {

/// Runs a group's operations one at a time, in the order of their sequence numbers. A synchronous call on an idle group
/// runs in the caller's thread, without a hand-over; every other call is queued for a progress thread. Thread-safe.
class CallQueue {
 public:
  /// Runs the operations.
  class Executor {
   public:
    /// One at a time.
    virtual Result<> run(const Operation& operation, Duration timeout) = 0;
    /// No operation runs any more. Like run(), never called while one runs.
    virtual void shut_down(const Error& why) = 0;
    /// A run() has failed, and other operations may run: calls the callbacks that may wait for one.
    virtual void run_callbacks() = 0;

   protected:
    ~Executor() = default;
  };

  /// `recorder` may be null. Both must outlive the queue.
  CallQueue(Executor& executor, Recorder* recorder, std::string group);
  /// Waits for the progress threads. Not to be called from one.
  ~CallQueue();
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  /// Gives the operation its sequence number and runs it, or queues it. kResourceExhausted: it was not begun and has no
  /// number, so the other ranks do not know of it.
  Work submit(Operation&& operation, Duration timeout, bool async);
  /// Waits for all operations begun before, and their hooks.
  Result<> wait_for_pending(const Deadline& deadline);
  void set_hook(CompletionHook hook);
  /// Calls Executor::shut_down() with `why`, now or after the current operation.
  void close(Error why);
  /// The error of the first operation that failed, or of close().
  std::optional<Error> first_error() const;
  /// Operations begun so far.
  uint64_t sequence() const { return execution_lock_.sequence(); }

 private:
  enum class State : uint8_t { kOpen, kClosed, kStopping };
  struct Job {
    Operation operation;
    Duration timeout;
    std::shared_ptr<Work::State> work;
    HookCall hook;
    Recorder::Ticket ticket = 0;
  };
  using Lock = std::unique_lock<std::mutex>;

  Work run_inline(const Operation& operation, Duration timeout, HookCall&& hook);
  Result<Work> enqueue(Job job);
  Result<> provide_thread();
  void run_progress_thread();
  Result<> run(const Operation& operation, Duration timeout, Recorder::Ticket ticket);
  void release(Lock& lock);
  size_t pending() const;
  Recorder::Ticket record(const Operation& operation, Recorder::Start start);

  Executor& executor_;
  Recorder* const recorder_;
  const std::string group_;
  ExecutionLock execution_lock_;
  mutable std::mutex mutex_;  ///< over all that follows
  std::condition_variable changed_;
  State state_ = State::kOpen;
  std::deque<Job> queue_;
  HookQueue hooks_;
  int waiting_for_all_ = 0;  ///< callers within wait_for_pending()
  std::optional<Error> first_error_;
  std::vector<std::thread> threads_;  ///< the first is started by the first call that is queued; more are rarely needed
  size_t free_threads_ = 0;           ///< of them, those that are not within callbacks
};

}  // namespace muster
