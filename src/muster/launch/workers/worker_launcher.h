#pragma once

#include <functional>
#include <vector>

#include "muster/launch/process_tree.h"
#include "muster/launch/workers/worker.h"

namespace muster {

/// Whose children the workers are: this process itself, or the zygote that forks them. It starts them and sees to it
/// that every process that comes of them ends. For the thread that drives the loop; events may come from within calls.
class WorkerLauncher {
 public:
  struct Events {
    std::function<void(int rank, pid_t pid)> started = [](int, pid_t) {};
    /// A worker cannot be started, or no more of them.
    std::function<void(const Error&)> failed = [](const Error&) {};
    /// A worker that was started has ended, with what waitpid() reported.
    std::function<void(pid_t pid, int wait_status)> ended = [](pid_t, int) {};
    /// No process of the workers' is left: said after the last has ended, and after terminate() and kill().
    std::function<void()> empty = [] {};
  };

  virtual ~WorkerLauncher() = default;
  /// Who hears of the workers from now on; {} for nobody.
  void attach(Events events) { events_ = std::move(events); }

  virtual void start(const WorkerSpec& spec, WorkerPipes pipes) = 0;
  /// SIGTERM to every worker's process group, to what workers left behind, and to what they yet will.
  virtual void terminate() = 0;
  /// SIGKILL to everything until nothing is left.
  virtual void kill() = 0;
  /// Asks for the processes that workers left behind; `answer` may come later, or never when the host is lost.
  virtual void list_left(std::function<void(const std::vector<ChildProcess>&)> answer) = 0;
  /// SIGCHLD came.
  virtual void child_ended() = 0;

 protected:
  Events events_;
};

}  // namespace muster
