#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "muster/base/wait_policy.h"
#include "muster/io/fd.h"
#include "muster/io/loop.h"
#include "muster/io/standby.h"
#include "muster/io/task_queue.h"

namespace muster {

/// Drives a loop: on one of the threads that wait for its events, or on one of the driver's own threads while no thread
/// waits. One lock guards everything. It is released only to sleep, to run callbacks and tasks, and between two turns
/// of the loop. So a call from another thread waits at most for one turn, and then does its own work itself.
///
/// A user may also add tasks, such as the handlers of remote calls. Only own threads run them, in the Leader/Followers
/// pattern (Schmidt et al. 2000): the own thread that drives the loop runs a task itself, because handing it to another
/// thread would cost more than a short task. Another own thread stands by (standby.h): if the task takes longer than
/// the grace time, that thread takes the loop and the next tasks.
///
/// The class has many fields because together they are the state of one protocol: how threads hand over the loop.
class LoopDriver {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// The interface of the user towards the driver. The functions are called with the lock held.
  class Delegate {
   public:
    /// True if the loop must be driven even if no thread waits.
    virtual bool has_work() const = 0;
    /// Ends the operations whose deadline has passed.
    virtual void expire() = 0;
    /// A time that is not later than the deadline of any pending operation.
    virtual TimePoint next_deadline() const = 0;
    /// Writes what was held back while runs_more_tasks() was true. Called before the loop is driven.
    virtual void flush() {}

   protected:
    ~Delegate() = default;
  };

  struct Options {
    /// How long work waits for a caller's thread to drive the loop, before an own thread does it.
    Duration grace = 1ms;
    /// The most tasks that run at a time. Tasks that are inside wait_until() do not count.
    int max_tasks = 1;
    /// A thread that has waited for longer than this leaves the loop to the others when a task is queued or another
    /// thread waits. Otherwise each task and each short wait would have to take the loop from it.
    Duration max_drive = Duration::max();
  };

  LoopDriver(std::unique_ptr<Loop> loop, Delegate& delegate, Options options);

  Loop& loop() { return *loop_; }
  Lock lock() { return Lock(mutex_); }

  // The functions below need the lock.

  /// Drives the loop until `done` or the deadline, or waits while another thread drives it. Releases the lock during
  /// the wait. After it, an own thread drives the loop if there is work. `begin` is called once, with the lock, when
  /// this thread has the loop, or when it has to wait for another one.
  void wait_until(Lock& lock, const std::function<bool()>& done, const Deadline& deadline,
                  std::function<void()> begin = nullptr);
  /// Handles events that are there already, unless another thread drives the loop. For a thread that begins many
  /// operations before it waits.
  void poll();
  /// Wakes the threads in wait_until(), so that they check their condition again.
  void notify() {
    if (waiting_ > 0) changed_.notify_all();
    for (Bystander* each : bystanders_) {
      if (each->done()) each->wake.notify_one();
    }
    if (driven_by_ == DrivenBy::kWaitingThread) wake();
  }
  /// Wakes the thread that sleeps in the loop, because there is new work.
  void wake() {
    if (parked_) loop_->wake();
  }
  /// Makes sure that pending work is done even if no thread waits for it. Starts the first own thread if needed. Wakes
  /// the thread that sleeps in the loop only if that thread would sleep for too long.
  void provide_progress();

  /// Queues a callback. It runs soon, without the lock, on any thread that uses the driver.
  void add_callback(std::function<void()> callback) { callbacks_.push_back(std::move(callback)); }
  /// Queues a callback that runs before all others in the queue.
  void add_first_callback(std::function<void()> callback) {
    callbacks_.insert(callbacks_.begin(), std::move(callback));
  }
  /// Runs all queued callbacks. Releases the lock while they run. Another thread drives the loop meanwhile if there is
  /// work, because a callback may take long.
  void run_callbacks(Lock& lock);

  using Task = TaskQueue::Task;
  /// Queues a task. Tasks start in the order of the calls, without the lock. Tasks that have not started when stop() is
  /// called are dropped.
  void add_task(std::shared_ptr<Task> task);
  template <class Function>
  void add_task(Function function);
  /// For a task: true if this thread will run another task before it drives the loop.
  bool runs_more_tasks() const { return on_own_thread() && driven_by_ == DrivenBy::kNoThread && !tasks_.empty(); }
  /// For a task that waits for something else than the loop: while this exists, the task does not count as running. On
  /// other threads it has no effect. Takes the lock itself.
  class BlockedTask {
   public:
    explicit BlockedTask(LoopDriver& driver) : driver_(driver) { pause(true); }
    ~BlockedTask() { pause(false); }
    BlockedTask(const BlockedTask&) = delete;
    BlockedTask& operator=(const BlockedTask&) = delete;

   private:
    void pause(bool paused) {
      if (!driver_.on_own_thread()) return;
      const Lock lock = driver_.lock();
      driver_.pause_task(paused);
    }
    LoopDriver& driver_;
  };
  /// True on an own thread of this driver. Needs no lock.
  bool on_own_thread() const;
  /// True on a thread that stop() waits for: an own thread, or one that runs a callback. Needs no lock.
  bool is_inside() const;

  /// Waits until no thread drives the loop or runs callbacks or tasks. No new ones begin. Returns true once: to the
  /// call that ended the last own thread. Returns false, and may be called again, if tasks or callbacks have not
  /// returned at the deadline. Must not be called if is_inside().
  bool stop(Lock& lock, const Deadline& deadline = Deadline::never());
  /// True once a call of stop() has returned true, or is about to.
  bool stopped() const { return stopped_; }
  /// Destroys the loop. Must be called after stop(), once no object refers to the loop.
  void close_loop() { loop_.reset(); }

 private:
  enum class DrivenBy : uint8_t { kNoThread, kWaitingThread, kOwnThread };
  /// A sleep of an own thread in the loop. Waiting threads may drive the loop meanwhile, and give it back: the own
  /// thread sleeps on. When it wakes and the loop is not its own any more, it stands by.
  struct Sleep {
    uint64_t number = 0;
    uint64_t drives = 0;  ///< drives_ when it began
    TimePoint until;
    bool woken = false;  ///< by wake_sleeper()
  };
  /// A thread in wait_until() that leaves the loop to others.
  struct Bystander {
    const std::function<bool()>& done;
    std::condition_variable wake;
  };

  void set_driver(DrivenBy driver);
  void give_back();
  bool is_free() const { return driven_by_ == DrivenBy::kNoThread || (driven_by_ == DrivenBy::kOwnThread && sleeper_); }
  void wake_sleeper();
  void provide_driver();
  void look_on(Lock& lock, const std::function<bool()>& done, const Deadline& deadline);
  bool take_turns(Lock& lock, const std::function<bool()>& done, const Deadline& deadline,
                  std::function<void()> begin = nullptr);
  bool park(Lock& lock, Duration max_sleep);
  void wait_for_event(Lock& lock, Duration max_sleep, bool own);
  void run_own_thread(bool stands_by);
  bool run_next_task(Lock& lock, Standby::Rest& state);
  bool drive(Lock& lock);
  void wake_in_time();
  void alert();
  void provide_standby();
  /// The thread stands by, or runs tasks at once.
  void start_thread(bool stands_by = false);
  /// The task of this own thread waits for something, or goes on.
  void pause_task(bool paused);

  Delegate& delegate_;
  const Duration max_drive_;
  std::mutex mutex_;  ///< guards all fields below, and the delegate
  std::unique_ptr<Loop> loop_;
  DrivenBy driven_by_ = DrivenBy::kNoThread;
  const Fd wake_up_;                   ///< an eventfd that wakes the sleeper alone
  std::optional<Sleep> sleeper_;       ///< the own thread that sleeps in the loop
  uint64_t sleeps_ = 0;                ///< of own threads since the beginning
  bool parked_ = false;                ///< true while the thread that drives the loop sleeps
  TimePoint parked_until_;             ///< the end of that sleep
  uint64_t drives_ = 0;                ///< how often a thread has begun to drive or poll the loop
  PollWait poll_wait_{kMessagePolls};  ///< used by the thread that drives the loop
  int waiting_ = 0;                    ///< threads that wait for changed_ in wait_until()
  std::condition_variable changed_;
  std::vector<Bystander*> bystanders_;
  std::vector<std::function<void()>> callbacks_;
  int calling_ = 0;  ///< threads that run callbacks now

  TaskQueue tasks_;
  std::vector<std::thread> threads_;  ///< the own threads
  Standby standby_;
  bool stopping_ = false;
  bool stopped_ = false;  ///< the own threads have ended, or are about to end
};

template <class Function>
void LoopDriver::add_task(Function function) {
  struct Call final : Task {
    explicit Call(Function&& called) : function(std::move(called)) {}
    void run() override { function(); }
    Function function;
  };
  add_task(std::shared_ptr<Task>(std::make_shared<Call>(std::move(function))));
}

}  // namespace muster
