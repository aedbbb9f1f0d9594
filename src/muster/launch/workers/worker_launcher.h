#pragma once

#include <functional>
#include <vector>

#include "muster/launch/process_tree.h"
#include "muster/launch/workers/worker.h"

namespace muster {

/// Starts workers, and ends all processes that the workers start. The workers are children of this process, or of a
/// zygote that forks them. For the thread that drives the loop. A call may invoke events before it returns.
class WorkerLauncher {
 public:
  struct Events {
    std::function<void(int rank, pid_t pid)> started = [](int, pid_t) {};
    /// This worker cannot be started, or no worker can be.
    std::function<void(const Error&)> failed = [](const Error&) {};
    /// A worker has ended; `wait_status` is as waitpid() reports it.
    std::function<void(pid_t pid, int wait_status)> ended = [](pid_t, int) {};
    /// No process of the workers is left. Called after the last process has ended, and after terminate() and kill().
    std::function<void()> empty = [] {};
  };

  virtual ~WorkerLauncher() = default;
  /// Sets the receiver of events; {} for none.
  void attach(Events events) { events_ = std::move(events); }

  virtual void start(const WorkerSpec& spec, WorkerPipes pipes) = 0;
  /// Sends a signal to the workers, but not to the processes that they have started.
  virtual void signal(int number) = 0;
  /// Ends all processes. Sends SIGTERM to the process groups of all workers, or another signal to the workers only.
  /// Orphans get SIGTERM, also those that appear later.
  virtual void terminate(int number) = 0;
  /// Sends SIGKILL to all processes until none is left.
  virtual void kill() = 0;
  /// Lists the processes that workers left behind. `answer` may be called later, or never if the zygote is lost.
  virtual void list_left(std::function<void(const std::vector<ChildProcess>&)> answer) = 0;
  /// Call it after SIGCHLD.
  virtual void child_ended() = 0;

 protected:
  Events events_;
};

}  // namespace muster
