#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

namespace muster {

/// Tasks that wait for a thread, and how many of them run. They start in the order in which they were added. Not
/// thread-safe.
class TaskQueue {
 public:
  class Task {
   public:
    virtual ~Task() = default;
    virtual void run() = 0;
    /// It runs mostly under a lock that other serial tasks need, too.
    virtual bool is_serial() const { return false; }
  };

  /// At most so many tasks run at a time. Paused tasks do not count.
  explicit TaskQueue(int max_running) : max_running_(max_running) {}

  void add(std::shared_ptr<Task> task) { waiting_.push_back(std::move(task)); }
  bool empty() const { return waiting_.empty(); }
  /// True if a task may start now.
  bool ready() const { return !empty() && running_ < max_running_; }

  /// The next task starts. Call end() when it has returned. ready() must be true.
  std::shared_ptr<Task> start() {
    auto task = std::move(waiting_.front());
    waiting_.pop_front();
    last_is_serial_ = task->is_serial();
    ++started_;
    ++unfinished_;
    ++running_;
    return task;
  }
  void end() {
    --unfinished_;
    --running_;
  }
  /// A task that runs waits for something else, until resume().
  void pause() { --running_; }
  void resume() { ++running_; }

  /// Tasks that have started since the beginning.
  uint64_t started() const { return started_; }
  /// The task that has started last is serial.
  bool last_is_serial() const { return last_is_serial_; }
  /// Tasks that have started and not returned.
  int unfinished() const { return unfinished_; }

  /// Takes the tasks that have not started.
  std::deque<std::shared_ptr<Task>> take_all() { return std::exchange(waiting_, {}); }

 private:
  const int max_running_;
  std::deque<std::shared_ptr<Task>> waiting_;
  uint64_t started_ = 0;
  bool last_is_serial_ = false;
  int unfinished_ = 0;
  int running_ = 0;  ///< of the unfinished ones, those that are not paused
};

}  // namespace muster
