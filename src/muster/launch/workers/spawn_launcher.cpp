#include "muster/launch/workers/spawn_launcher.h"

#include <csignal>
#include <utility>

namespace muster {
namespace {

constexpr Duration kKillPause = std::chrono::milliseconds(10);

}  // namespace

void SpawnLauncher::start(const WorkerSpec& spec, WorkerPipes pipes) {
  mode_ = Mode::kRun;
  const auto pid = spawn(spec, pipes);
  if (!pid) return events_.failed(pid.error());
  workers_.insert(*pid);
  events_.started(spec.rank, *pid);
}

void SpawnLauncher::signal(int number) {
  for (const pid_t pid : workers_) ::kill(pid, number);
}

void SpawnLauncher::terminate(int number) {
  mode_ = Mode::kTerminate;
  terminated_.clear();
  number == SIGTERM ? signal_groups(number) : signal(number);
  reap();
}

void SpawnLauncher::kill() {
  mode_ = Mode::kKill;
  keep_killing();
}

// Repeats on a timer, because no signal announces an orphan.
void SpawnLauncher::keep_killing() {
  timer_.stop();
  signal_groups(SIGKILL);
  kill_children();
  reap();
  if (mode_ == Mode::kKill) timer_.start(kKillPause, [this] { keep_killing(); });
}

void SpawnLauncher::list_left(std::function<void(const std::vector<ChildProcess>&)> answer) {
  std::vector<ChildProcess> left;
  for (auto& child : running_children())
    if (!workers_.contains(child.pid)) left.push_back(std::move(child));
  answer(left);
}

void SpawnLauncher::reap() {
  if (std::exchange(reaping_, true)) return;  // called by an event; the outer call does the rest
  auto reaped = reap_children();
  // Removes all ended workers before the first event. An event may signal the other workers, and the PIDs of ended ones
  // are free now.
  std::erase_if(reaped.ended, [this](const EndedChild& child) {
    terminated_.erase(child.pid);
    return workers_.erase(child.pid) == 0;
  });
  for (const auto& worker : reaped.ended) events_.ended(worker.pid, worker.status);
  reaping_ = false;
  if (mode_ == Mode::kTerminate) terminate_orphans();
  if (!reaped.none_left) return;
  mode_ = Mode::kRun;
  events_.empty();
}

void SpawnLauncher::signal_groups(int number) {
  for (const pid_t pid : workers_) {
    // A process group's number stays in use until its leader is reaped and all members are gone. After that another
    // group may get the number. So only groups whose leader is not yet reaped are signaled, and orphans are signaled
    // one by one.
    ::kill(-pid, number);
    if (number != SIGKILL) ::kill(-pid, SIGCONT);  // a stopped process does not handle SIGTERM
  }
}

void SpawnLauncher::terminate_orphans() {
  for (const auto& child : running_children()) {
    if (workers_.contains(child.pid) || !terminated_.insert(child.pid).second) continue;
    ::kill(child.pid, SIGTERM);
    ::kill(child.pid, SIGCONT);
  }
}

}  // namespace muster
