#include "muster/launch/process_tree.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>

#include "muster/launch/options/option_values.h"

namespace muster {
namespace {

struct Stat {
  std::string name;
  char state = 0;
  pid_t parent = 0;
};

// /proc/<pid>/stat is "pid (name) state ppid ...". The name may contain any byte, also a ')'.
std::optional<Stat> read_stat(const std::filesystem::path& directory) {
  std::ifstream file(directory / "stat");
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  const size_t open = text.find('(');
  const size_t close = text.rfind(')');
  if (open == std::string::npos || close == std::string::npos) return std::nullopt;
  Stat stat;
  stat.name = text.substr(open + 1, close - open - 1);
  if (std::sscanf(text.c_str() + close + 1, " %c %d", &stat.state, &stat.parent) != 2) return std::nullopt;
  return stat;
}

// Returns the entries of a directory that are numbers.
std::vector<pid_t> numbers_in(const char* directory) {
  std::vector<pid_t> numbers;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename();
    if (const auto number = to_number<pid_t>(name)) numbers.push_back(*number);
  }
  return numbers;
}

// Returns the children of this process, and maybe other processes. The kernel lists the children of each thread.
// Without this list all processes must be searched, and a large host has thousands.
std::vector<pid_t> possible_children() {
  std::vector<pid_t> children;
  for (const pid_t thread : numbers_in("/proc/self/task")) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/children");
    if (!file && thread == ::getpid()) return numbers_in("/proc");
    for (pid_t pid = 0; file >> pid;) children.push_back(pid);
  }
  return children;
}

}  // namespace

Fd open_process(pid_t pid) { return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }

bool has_ended(const Fd& process, Duration patience) {
  pollfd entry{process.get(), POLLIN, 0};
  return !process || ::poll(&entry, 1, static_cast<int>(patience / std::chrono::milliseconds(1))) > 0;
}

void signal_process(const Fd& process, int number) {
  if (process) ::syscall(SYS_pidfd_send_signal, process.get(), number, nullptr, 0);
}

void adopt_orphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

void restore_signals(std::initializer_list<int> numbers) {
  for (const int number : numbers) ::signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

std::vector<ChildProcess> running_children() {
  std::vector<ChildProcess> children;
  for (const pid_t pid : possible_children()) {
    const auto stat = read_stat("/proc/" + std::to_string(pid));
    if (stat && stat->parent == ::getpid() && stat->state != 'Z') children.push_back({pid, stat->name});
  }
  return children;
}

ReapedChildren reap_children() {
  ReapedChildren reaped;
  EndedChild child;
  while ((child.pid = ::waitpid(-1, &child.status, WNOHANG)) > 0) reaped.ended.push_back(child);
  reaped.none_left = child.pid < 0 && errno == ECHILD;
  const auto was_signalled = [](const EndedChild& ended) { return WIFSIGNALED(ended.status); };
  std::stable_partition(reaped.ended.begin(), reaped.ended.end(), was_signalled);
  return reaped;
}

void reap_child(pid_t pid) {
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void kill_children() {
  for (const auto& child : running_children()) ::kill(child.pid, SIGKILL);
}

bool kill_all_children(const Deadline& deadline) {
  sigset_t child_ended;
  sigemptyset(&child_ended);
  sigaddset(&child_ended, SIGCHLD);
  const timespec look_again{0, 2'000'000};
  while (true) {
    kill_children();
    if (reap_children().none_left) return true;
    if (deadline.passed()) return false;
    ::sigtimedwait(&child_ended, nullptr, &look_again);
  }
}

}  // namespace muster
