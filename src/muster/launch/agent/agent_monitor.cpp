#include "muster/launch/agent/agent_monitor.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>

#include "muster/base/log.h"
#include "muster/launch/process_tree.h"

namespace muster {
namespace {

constexpr Duration kKillTime = std::chrono::seconds(10);

pid_t guard_pid = 0;  // set before the fork, read by the one thread of each process

[[noreturn]] void be_agent(const std::function<int()>& agent, const sigset_t& old_mask) {
  ::setpgid(0, 0);  // a Ctrl-C at the terminal is the guard's to pass on, once
  ::signal(SIGTTOU, SIG_IGN);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (monitor_is_gone()) ::_exit(128 + SIGKILL);
  ::sigprocmask(SIG_SETMASK, &old_mask, nullptr);
  std::exit(agent());
}

int exit_status(int status) {
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  return 128 + WTERMSIG(status);
}

// Reaps what has ended; true once the agent has.
bool reap(pid_t agent, int& agent_status) {
  bool ended = false;
  int status = 0;
  for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    if (pid != agent) continue;
    ended = true;
    agent_status = status;
  }
  return ended;
}

int be_guard(pid_t agent, const sigset_t& signals, const std::function<void()>& killed) {
  adopt_orphans();
  int status = 0;
  while (true) {
    const int number = ::sigwaitinfo(&signals, nullptr);
    if (number == SIGCHLD) {
      if (reap(agent, status)) break;
    } else if (number > 0) {
      ::kill(agent, number);
    }
  }
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
    log(LogLevel::kError, "muster run: its agent was killed; ending the workers");
  if (!kill_all_children(Deadline::after(kKillTime)))
    log(LogLevel::kError, "muster run: some processes of the job could not be killed");
  if (WIFSIGNALED(status)) killed();
  return exit_status(status);
}

}  // namespace

bool monitor_is_gone() { return ::getppid() != guard_pid; }

int run_monitored(const std::function<int()>& agent, const std::vector<int>& pass_on,
                  const std::function<void()>& killed) {
  ::signal(SIGCHLD, SIG_DFL);  // whoever started this may have left it ignored, and then nothing can be waited for
  sigset_t signals, old_mask;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  for (const int number : pass_on) sigaddset(&signals, number);
  ::sigprocmask(SIG_BLOCK, &signals, &old_mask);
  guard_pid = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) be_agent(agent, old_mask);
  if (pid > 0) return be_guard(pid, signals, killed);
  log(LogLevel::kError, std::string("muster run: cannot fork: ") + std::strerror(errno));
  return 1;
}

}  // namespace muster
