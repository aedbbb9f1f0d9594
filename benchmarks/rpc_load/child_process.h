#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>

namespace muster::bench {

/// A child that runs until the object is destroyed.
class ChildProcess {
 public:
  /// `run` does not return.
  explicit ChildProcess(const std::function<void()>& run) : parent_(getpid()), pid_(fork()) {
    if (pid_ < 0) {  // without this, the destructor would kill all processes of the user
      std::perror("muster-rpc-load: cannot fork");
      std::_Exit(1);
    }
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent_) std::_Exit(1);  // it has ended already
    run();
  }
  ~ChildProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  pid_t pid() const { return pid_; }

 private:
  const pid_t parent_, pid_;
};

}  // namespace muster::bench
