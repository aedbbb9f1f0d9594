#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>

namespace muster::bench {

/// A child that serves until the object is destroyed.
class ServerProcess {
 public:
  /// `serve` does not return.
  explicit ServerProcess(const std::function<void()>& serve) : parent_(getpid()), pid_(fork()) {
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent_) std::_Exit(1);  // it has ended already
    serve();
  }
  ~ServerProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

 private:
  const pid_t parent_, pid_;
};

}  // namespace muster::bench
