#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

#include "muster/base/clock.h"

namespace muster {

/// Decides when the idle threads of a LoopDriver look for work. One of them stands by: it naps, so that a thread that
/// begins an operation need not wake it, and looks for work after each nap. After many naps without work it sleeps
/// until it is alerted. The other idle threads sleep until one of them must stand by.
///
/// All functions need the lock of the driver.
class Standby {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// What the threads of the driver have done since the beginning.
  struct Activity {
    uint64_t drives = 0;  ///< how often a thread has begun to drive or poll the loop
    uint64_t tasks = 0;   ///< tasks that have started
    bool serial = false;  ///< the task that has started last is serial
  };

  /// How a thread has rested, and what it may do after it.
  struct Rest {
    int naps = 0;             ///< naps since it last had work
    bool may_run = true;      ///< false: the tasks of the other threads were quick or serial, or none waits
    bool may_drive = true;    ///< no other thread has driven the loop during the last nap
    bool only_calls = false;  ///< other threads have driven it, and no task has begun
  };

  /// `has_task`: a task may start.
  Standby(Duration nap, std::function<bool()> has_task, std::function<Activity()> activity);

  /// Returns when this thread should look for work.
  void rest(Lock& lock, Rest& state);
  /// Makes the thread that stands by look for work at once.
  void alert();
  /// Wakes another idle thread, so that it stands by. It naps before it looks for work. False if there is none.
  bool replace();
  /// Wakes all idle threads. From now on rest() returns at once.
  void stop();

  bool has_thread() const { return state_ != State::kNone; }
  bool is_napping() const { return state_ == State::kNapping; }
  bool is_asleep() const { return state_ == State::kAsleep; }
  /// A new thread will stand by. Until it calls arrive() and rest(), it counts as napping.
  void expect() { state_ = State::kNapping; }
  void arrive() { state_ = State::kNone; }

 private:
  enum class State : uint8_t { kNone, kNapping, kAsleep };

  bool is_needed() const { return stopped_ || has_task_(); }
  bool wait_for_alert(Lock& lock, bool may_drive);
  Rest nap(Lock& lock, const Rest& before);

  const Duration nap_;
  const std::function<bool()> has_task_;
  const std::function<Activity()> activity_;
  State state_ = State::kNone;  ///< of the thread that stands by
  bool alerted_ = false;
  std::condition_variable alert_;  ///< wakes the thread that stands by
  int idle_ = 0;                   ///< threads that wait for replace_
  bool replacing_ = false;         ///< replace() was called, and no thread has come
  std::condition_variable replace_;
  bool stopped_ = false;
};

}  // namespace muster
