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
#include "muster/launch/failure.h"
#include "muster/launch/process_tree.h"

namespace muster {
namespace {

constexpr Duration kKillTime = std::chrono::seconds(10);

pid_t monitor_pid = 0;  // set before the fork, read by the one thread of each process

[[noreturn]] void be_agent(const std::function<int()>& agent, const sigset_t& old_mask) {
  ::setpgid(0, 0);  // a terminal's Ctrl-C reaches only the monitor, which passes it on once
  ::signal(SIGTTOU, SIG_IGN);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (monitor_is_gone()) ::_exit(128 + SIGKILL);
  ::sigprocmask(SIG_SETMASK, &old_mask, nullptr);
  std::exit(agent());
}

// Passes signals on until the agent ends, and returns how it ended.
int await_agent(pid_t agent, const sigset_t& signals) {
  while (true) {
    const int number = ::sigwaitinfo(&signals, nullptr);
    if (number > 0 && number != SIGCHLD) ::kill(agent, number);
    if (number != SIGCHLD) continue;
    for (const auto& child : reap_children().ended)
      if (child.pid == agent) return child.status;
  }
}

int be_monitor(pid_t agent, const sigset_t& signals, const std::function<void()>& killed) {
  adopt_orphans();
  const int status = await_agent(agent, signals);
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
    log(LogLevel::kError, "muster run: its agent was killed; ending the workers");
  if (!kill_all_children(Deadline::after(kKillTime)))
    log(LogLevel::kError, "muster run: some processes of the job could not be killed");
  if (WIFSIGNALED(status)) killed();
  return worker_exit(0, "", agent, status).status();
}

}  // namespace

bool monitor_is_gone() { return ::getppid() != monitor_pid; }

int run_monitored(const std::function<int()>& agent, const std::vector<int>& pass_on,
                  const std::function<void()>& killed) {
  ::signal(SIGCHLD, SIG_DFL);  // with an inherited SIG_IGN, no child could be reaped
  sigset_t signals, old_mask;
  sigemptyset(&signals);
  sigaddset(&signals, SIGCHLD);
  for (const int number : pass_on) sigaddset(&signals, number);
  ::sigprocmask(SIG_BLOCK, &signals, &old_mask);
  monitor_pid = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) be_agent(agent, old_mask);
  if (pid > 0) return be_monitor(pid, signals, killed);
  log(LogLevel::kError, std::string("muster run: cannot fork: ") + std::strerror(errno));
  return 1;
}

}  // namespace muster
