#pragma once

#include <csignal>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/io/loop.h"
#include "muster/launch/failure.h"
#include "muster/launch/output/console.h"
#include "muster/launch/output/output_files.h"
#include "muster/launch/output/worker_output.h"
#include "muster/launch/signals.h"
#include "muster/launch/timer.h"
#include "muster/launch/workers/worker_launcher.h"

namespace muster {

/// Starts this node's workers, copies their output, waits for them and ends them. When all are gone it can start the
/// next generation. Everything runs on the thread that drives the loop. The process must have called adopt_orphans(),
/// and must have no other children than the workers and the zygote.
///
/// It has more than 12 fields, because the state of one generation belongs together.
class Supervisor {
 public:
  struct Options {
    std::string host;
    OutputFiles& outputs;              ///< gets the workers' output; must outlive this
    std::vector<int> signals;          ///< signals that `signaled` reports
    Duration shutdown_timeout;         ///< between stop() and SIGKILL
    WorkerLauncher* zygote = nullptr;  ///< forks the workers; null: each worker is spawned
    std::string root = "/";            ///< the root directory, where cgroups are found
  };
  struct Events {
    std::function<void(const WorkerExit&)> worker_ended;
    /// The first worker has failed; `report` is for the user. Not called after stop().
    std::function<void(const WorkerExit&, std::string report)> failed;
    /// All workers have succeeded.
    std::function<void()> succeeded;
    /// One of options.signals came.
    std::function<void(int)> signaled;
    /// A worker could not be started after start() returned. The other workers are being stopped. Not called after
    /// stop().
    std::function<void(const Error&)> start_failed;
  };

  static Result<std::unique_ptr<Supervisor>> create(Loop& loop, Console& console, Options options, Events events);
  ~Supervisor();

  /// Call it once, and again each time when gone(). `specs` are in the order of local ranks. Returns the error of the
  /// first worker that cannot be started. The workers before it keep running.
  Result<> start(const std::vector<WorkerSpec>& specs);
  /// Sends a signal to the workers. They go on if they handle it.
  void forward(int number) { launcher_.signal(number); }
  /// The reason to report if this signal ends this worker before stop().
  void expect_end(pid_t pid, int signal, const std::string& cause);
  /// Ends the workers and the processes that they left behind (WorkerLauncher::terminate()). SIGKILL follows after the
  /// shutdown timeout.
  void stop(int number = SIGTERM);
  /// Sends SIGKILL to all of them at once.
  void kill();
  /// True if no process of this generation is left.
  bool gone() const { return gone_; }
  /// The workers' PIDs by local rank; 0 for a worker that has not started yet.
  std::vector<pid_t> pids() const;

 private:
  struct Slot {
    int rank = 0;
    pid_t pid = 0;  // 0: not yet started
    std::unique_ptr<WorkerOutput> out, err;
    std::string error_file;
    int expected_signal = 0;  // 0: none
    std::string expected_cause;
    std::optional<WorkerExit> exit;

    std::string state() const;
  };
  enum class Phase {
    kRunning,
    kLingering,  // the workers have succeeded; processes that they left have some time to end
    kStopping,   // also while processes are killed
  };

  Supervisor(Loop& loop, Console& console, Options options, Events events);
  WorkerLauncher::Events launcher_events();
  Result<WorkerPipes> add_slot(const WorkerSpec& spec);
  void worker_ended(Slot& slot, int wait_status);
  std::string cause_of(const Slot& slot) const;
  void start_failed(const Error& error);
  void report_failure(const Slot& slot);
  void finish_when_all_succeeded();
  void end_leftovers();
  void escalate(int number);
  void on_gone();

  Console& console_;
  Options options_;
  Events events_;
  std::unique_ptr<WorkerLauncher> own_launcher_;
  WorkerLauncher& launcher_;
  std::unique_ptr<SignalPipe> signals_;
  std::vector<Slot> slots_;
  std::optional<Error> start_error_;
  Phase phase_ = Phase::kRunning;
  Timer timer_;
  uint64_t oom_kills_ = 0;  // before the workers started
  bool starting_ = false, gone_ = false;
};

}  // namespace muster
