#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "muster/base/wait_policy.h"
#include "muster/io/loop.h"

namespace muster {

/// Drives the loop of a P2P engine: on one of the threads that wait for messages, or on the driver's own thread while
/// no thread waits. One lock guards everything. It is released only to sleep, to run callbacks, and between two turns
/// of the loop. So a call from another thread waits at most for one turn, and then does its own work itself.
///
/// The class has many fields because together they are the state of one protocol: how threads hand over the loop.
class P2pDriver {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// The interface of the engine towards the driver. The functions are called with the lock held.
  class Client {
   public:
    /// True if the loop must be driven even if no thread waits.
    virtual bool has_work() const = 0;
    /// Ends the operations whose deadline has passed.
    virtual void expire() = 0;
    /// A time that is not later than the deadline of any pending operation.
    virtual TimePoint next_deadline() const = 0;

   protected:
    ~Client() = default;
  };

  /// How long work waits for a caller's thread to drive the loop, before the driver's own thread does it.
  static constexpr Duration kGrace = 1ms;

  P2pDriver(std::unique_ptr<Loop> loop, Client& client) : client_(client), loop_(std::move(loop)) {}

  Loop& loop() { return *loop_; }
  Lock lock() { return Lock(mutex_); }

  // The functions below need the lock.

  /// Drives the loop until `done` or the deadline, or waits while another thread drives it. Releases the lock during
  /// the wait.
  void wait_until(Lock& lock, const std::function<bool()>& done, const Deadline& deadline);
  /// Wakes the threads in wait_until(), so that they check their condition again.
  void notify() {
    if (waiting_ > 0) changed_.notify_all();
  }
  /// Wakes the thread that sleeps in the loop, because there is new work.
  void wake() {
    if (parked_) loop_->wake();
  }
  /// Makes sure that pending work is done even if no thread waits for it. Starts the driver's own thread if needed.
  void provide_progress();

  /// Queues a callback. It runs soon, without the lock.
  void add_callback(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }
  /// Queues a callback that runs before all others in the queue.
  void add_first_callback(std::function<void()> callback) {
    callbacks_.insert(callbacks_.begin(), std::move(callback));
  }
  /// Runs all queued callbacks. Releases the lock while they run.
  void run_callbacks(Lock& lock);

  /// Waits until no thread drives the loop or runs callbacks. After that, no thread does so again. Returns false if
  /// stop() was called before.
  bool stop(Lock& lock);
  /// Destroys the loop. Must be called after stop(), once no object refers to the loop.
  void close_loop() { loop_.reset(); }

 private:
  enum class DrivenBy : uint8_t { kNoThread, kWaitingThread, kOwnThread };

  void take_turns(Lock& lock, const std::function<bool()>& done, const Deadline& deadline);
  void park(Lock& lock, Duration max_sleep);
  void run_own_thread();

  Client& client_;
  std::mutex mutex_;  ///< guards all fields below, and the client
  std::unique_ptr<Loop> loop_;
  DrivenBy driven_by_ = DrivenBy::kNoThread;
  bool parked_ = false;                ///< true while the thread that drives the loop sleeps
  PollWait poll_wait_{kMessagePolls};  ///< used by the thread that drives the loop
  int waiting_ = 0;                    ///< threads that wait for changed_ in wait_until()
  std::condition_variable changed_;
  std::vector<std::function<void()>> callbacks_;
  int calling_ = 0;  ///< threads that run callbacks now

  std::thread thread_;
  bool asleep_ = false;           ///< true while thread_ sleeps until work_ is notified
  std::condition_variable work_;  ///< wakes thread_
  bool stopping_ = false;
};

}  // namespace muster
