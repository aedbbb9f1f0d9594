#include "muster/launch/workers/spawn_launcher.h"

#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <utility>

namespace muster {
namespace {

constexpr Duration kKillPause = std::chrono::milliseconds(10);

}  // namespace

SpawnLauncher::~SpawnLauncher() {
  if (timer_ != 0) loop_.cancel(timer_);
}

void SpawnLauncher::start(const WorkerSpec& spec, WorkerPipes pipes) {
  mode_ = Mode::kRun;
  const auto pid = spawn(spec, pipes);
  if (!pid) return events_.failed(pid.error());
  workers_.insert(*pid);
  events_.started(spec.rank, *pid);
}

void SpawnLauncher::terminate() {
  mode_ = Mode::kTerminate;
  told_.clear();
  signal_workers(SIGTERM);
  reap();
}

void SpawnLauncher::kill() {
  mode_ = Mode::kKill;
  keep_killing();
}

// An orphan becomes visible here when its parent has died, and of that nobody is told: so this looks again and again.
void SpawnLauncher::keep_killing() {
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = 0;
  signal_workers(SIGKILL);
  for (const auto& child : running_children()) ::kill(child.pid, SIGKILL);
  reap();
  if (mode_ == Mode::kKill) timer_ = loop_.after(kKillPause, [this] { keep_killing(); });
}

void SpawnLauncher::list_left(std::function<void(const std::vector<ChildProcess>&)> answer) {
  std::vector<ChildProcess> left;
  for (auto& child : running_children())
    if (!workers_.contains(child.pid)) left.push_back(std::move(child));
  answer(left);
}

// waitpid() goes by age. Of workers that ended since the last look one that a signal ended is told of first: it is more
// likely to be why the others failed than the other way round.
bool SpawnLauncher::reap_workers() {
  std::vector<std::pair<pid_t, int>> ended;
  int status = 0;
  pid_t pid = 0;
  while ((pid = ::waitpid(-1, &status, WNOHANG)) > 0) {
    told_.erase(pid);
    if (workers_.erase(pid) > 0) ended.emplace_back(pid, status);
  }
  const bool childless = pid < 0 && errno == ECHILD;
  std::stable_partition(ended.begin(), ended.end(), [](const auto& worker) { return WIFSIGNALED(worker.second); });
  for (const auto& [worker, how] : ended) events_.ended(worker, how);
  return childless;
}

void SpawnLauncher::reap() {
  if (std::exchange(reaping_, true)) return;  // from an event: what there is to do is done after it
  const bool childless = reap_workers();
  reaping_ = false;
  if (mode_ == Mode::kTerminate) signal_orphans(SIGTERM);
  if (!childless) return;
  mode_ = Mode::kRun;
  events_.empty();
}

void SpawnLauncher::signal_workers(int number) {
  for (const pid_t pid : workers_) {
    // The group outlives its leader while a member is left, and no other process can get its number meanwhile. Once
    // all are gone the number is free: so only groups whose leader is not reaped, and orphans one by one.
    ::kill(-pid, number);
    if (number != SIGKILL) ::kill(-pid, SIGCONT);  // a stopped process would never see it
  }
}

void SpawnLauncher::signal_orphans(int number) {
  for (const auto& child : running_children()) {
    if (workers_.contains(child.pid) || !told_.insert(child.pid).second) continue;
    ::kill(child.pid, number);
    ::kill(child.pid, SIGCONT);
  }
}

}  // namespace muster
