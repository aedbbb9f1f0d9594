#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "muster/flight/recorder.h"
#include "muster/group/queue/execution_lock.h"
#include "muster/group/queue/hook_queue.h"
#include "muster/group/queue/start_policy.h"
#include "muster/group/work_state.h"

namespace muster {

/// Runs a group's operations one at a time, in the order of their sequence numbers (the executor may begin the next one
/// early). A synchronous call on an idle group
/// runs in the caller's thread, because a hand-over to another thread costs more than a small message. Every other call
/// is queued. Either a progress thread runs it, or the thread that waits for it, if that comes first (StartPolicy).
/// Thread-safe.
///
/// It keeps inline calls, progress threads and hooks in one order, so one mutex guards the fields of all three.
class CallQueue {
 public:
  /// The component that runs the operations.
  class Executor {
   public:
    /// Runs one operation. Calls never overlap.
    virtual Result<> run(const Operation& operation, Duration timeout) = 0;
    /// Called when the queue is closed. Never called while run() runs.
    virtual void shut_down(const Error& why) = 0;
    /// Called after a run() has failed, without locks held: runs callbacks that may wait for another operation.
    virtual void run_callbacks() = 0;

   protected:
    ~Executor() = default;
  };

  /// `recorder` may be null. `executor` and `recorder` must outlive the queue.
  CallQueue(Executor& executor, Recorder* recorder, std::string group);
  /// Waits for the progress threads. Must not be called from a progress thread.
  ~CallQueue();
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  /// Gives the operation its sequence number, then runs or queues it. kResourceExhausted if the operation did not
  /// begin: then it has no sequence number, and the order of calls at the other ranks is not affected.
  Work submit(Operation&& operation, Duration timeout, bool async);
  /// Waits for all operations that began before this call, and for their hooks. kTimeout at the deadline.
  Result<> wait_for_pending(const Deadline& deadline);
  void set_hook(CompletionHook hook);
  /// Calls Executor::shut_down() with the first error, which is `why` unless an operation failed before. Does it now,
  /// or after the current operation.
  void close(Error why);
  /// The error of the first operation that failed, or the argument of close() if that came first.
  std::optional<Error> first_error() const;
  /// The first queued operation, or null. For the executor, during run(): it stays in place until that returns.
  const Operation* next() const { return next_.load(std::memory_order_acquire); }
  /// The number of operations that have begun.
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

  /// The WorkDriver of all queued operations.
  class Waiters;
  using Callbacks = std::vector<std::function<void(const Result<>&)>>;

  Work run_inline(const Operation& operation, Duration timeout, HookCall&& hook);
  Result<Work> enqueue(Job job);
  Result<> provide_thread();
  void run_progress_thread();
  std::pair<Result<>, Callbacks> run_first(Lock& lock);
  void run_awaited(const Work::State& state, const Deadline& deadline) noexcept;
  Result<> run(const Operation& operation, Duration timeout, Recorder::Ticket ticket);
  void release(Lock& lock);
  size_t pending() const;
  Recorder::Ticket record(const Operation& operation, Recorder::Start start);

  Executor& executor_;
  Recorder* const recorder_;
  const std::string group_;
  const std::shared_ptr<Waiters> waiters_;
  ExecutionLock execution_lock_;
  mutable std::mutex mutex_;  ///< guards all fields below
  std::condition_variable changed_;
  State state_ = State::kOpen;
  std::deque<Job> queue_;
  std::atomic<const Operation*> next_ = nullptr;  ///< of the first job; read without the mutex
  StartPolicy starts_;
  HookQueue hooks_;
  int waiting_for_all_ = 0;  ///< callers in wait_for_pending()
  std::optional<Error> first_error_;
  std::vector<std::thread> threads_;  ///< started on demand; more than one is rarely needed
  size_t free_threads_ = 0;           ///< progress threads that do not run callbacks now
};

}  // namespace muster
