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

/// Drives the loop of a P2P engine: on one of the threads that wait for messages, or, while none waits, on a thread of
/// its own. Everything happens under one lock, which is released only to sleep, to run callbacks, and between two turns
/// of the loop. So a call from another thread never waits longer than one turn, and does its own work itself.
///
/// It has more fields than other classes, because they are the state of one protocol: how threads hand the loop over.
class P2pDriver {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// What the driver asks of the engine, with the lock held.
  class Client {
   public:
    /// Whether the loop has to be driven although no thread waits.
    virtual bool has_work() const = 0;
    /// Ends the operations whose deadline has passed.
    virtual void expire() = 0;
    /// Not later than any deadline.
    virtual TimePoint next_deadline() const = 0;

   protected:
    ~Client() = default;
  };

  /// How long work waits for a thread that drives the loop by itself before the driver's own thread does.
  static constexpr Duration kGrace = 1ms;

  P2pDriver(std::unique_ptr<Loop> loop, Client& client) : client_(client), loop_(std::move(loop)) {}

  Loop& loop() { return *loop_; }
  Lock lock() { return Lock(mutex_); }

  // With the lock held.

  /// Drives the loop, or waits while another thread does, until `done` or the deadline. Releases the lock meanwhile.
  void wait_until(Lock& lock, const std::function<bool()>& done, const Deadline& deadline);
  /// Wakes the threads within wait_until(), because something is done.
  void notify() {
    if (waiting_ > 0) changed_.notify_all();
  }
  /// Wakes the thread that sleeps in the loop, because there is something new to wait for.
  void wake() {
    if (parked_) loop_->wake();
  }
  /// Makes sure that work is done although no thread may wait for it.
  void provide_progress();

  /// Runs `callback` soon, without the lock.
  void add_callback(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }
  /// Runs it before all others.
  void add_first_callback(std::function<void()> callback) {
    callbacks_.insert(callbacks_.begin(), std::move(callback));
  }
  /// Runs all callbacks. Releases the lock meanwhile.
  void run_callbacks(Lock& lock);

  /// Waits until no thread drives the loop or runs callbacks; from then on none does. False: it was called before.
  bool stop(Lock& lock);
  /// After stop(), once nothing refers to the loop.
  void close_loop() { loop_.reset(); }

 private:
  enum class DrivenBy : uint8_t { kNoThread, kWaitingThread, kOwnThread };

  void take_turns(Lock& lock, const std::function<bool()>& done, const Deadline& deadline);
  void park(Lock& lock, Duration max_sleep);
  void run_own_thread();

  Client& client_;
  std::mutex mutex_;  ///< over all that follows, and over the client
  std::unique_ptr<Loop> loop_;
  DrivenBy driven_by_ = DrivenBy::kNoThread;
  bool parked_ = false;                ///< the thread that drives the loop sleeps
  PollWait poll_wait_{kMessagePolls};  ///< of the thread that drives the loop
  int waiting_ = 0;                    ///< threads that wait for changed_
  std::condition_variable changed_;
  std::vector<std::function<void()>> callbacks_;
  int calling_ = 0;  ///< threads within callbacks

  std::thread thread_;
  bool asleep_ = false;           ///< thread_, until work_ is notified
  std::condition_variable work_;  ///< for thread_
  bool stopping_ = false;
};

}  // namespace muster
