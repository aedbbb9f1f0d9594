#pragma once

#include <set>

#include "muster/launch/timer.h"
#include "muster/launch/workers/worker_launcher.h"

namespace muster {

/// Starts workers as children of this process. It must have called adopt_orphans() and must have no other children.
class SpawnLauncher : public WorkerLauncher {
 public:
  explicit SpawnLauncher(Loop& loop) : timer_(loop) {}

  void start(const WorkerSpec& spec, WorkerPipes pipes) override;
  void signal(int number) override;
  void terminate(int number) override;
  void kill() override;
  void list_left(std::function<void(const std::vector<ChildProcess>&)> answer) override;
  void child_ended() override { reap(); }

 private:
  enum class Mode { kRun, kTerminate, kKill };
  void reap();
  void signal_groups(int number);
  void terminate_orphans();
  void keep_killing();

  std::set<pid_t> workers_;
  std::set<pid_t> terminated_;  // orphans that were sent SIGTERM
  Mode mode_ = Mode::kRun;
  bool reaping_ = false;
  Timer timer_;
};

}  // namespace muster
