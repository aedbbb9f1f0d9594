#pragma once

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
#include "muster/launch/workers/worker_launcher.h"

namespace muster {

/// Starts this node's workers, passes their output on, waits for them and ends them; once they are gone it can start
/// the next. Everything runs on the thread that drives the loop; the process must have called adopt_orphans(), and has
/// no children of its own beside the workers and the zygote.
class Supervisor {
 public:
  struct Options {
    std::string host;
    OutputFiles& outputs;              ///< where the workers write; outlives this
    std::vector<int> signals;          ///< handed to `signalled`
    Duration shutdown_timeout;         ///< between SIGTERM and SIGKILL
    WorkerLauncher* zygote = nullptr;  ///< forks the workers; null: each is started as a program of its own
  };
  struct Events {
    std::function<void(const WorkerExit&)> worker_ended;
    /// A worker has failed, for the first time: what to tell about it. Not after stop().
    std::function<void(const WorkerExit&, std::string report)> failed;
    /// All workers have ended well.
    std::function<void()> all_well;
    /// One of options.signals: what to do is the agent's affair.
    std::function<void(int)> signalled;
    /// A worker cannot be started, found after start() returned. The others are being stopped. Not after stop().
    std::function<void(const Error&)> start_failed;
  };

  static Result<std::unique_ptr<Supervisor>> create(Loop& loop, Console& console, Options options, Events events);
  ~Supervisor();

  /// For the first time, or again when gone(). `specs` are in the order of local ranks. The first worker that cannot be
  /// started is the error; those before it are running then.
  Result<> start(const std::vector<WorkerSpec>& specs);
  /// SIGTERM to every worker's process group and to what the workers left behind; SIGKILL after the shutdown timeout.
  void stop();
  /// SIGKILL to all, now.
  void kill();
  /// No process of this node's is left.
  bool gone() const { return gone_; }
  /// Of the workers, by local rank; 0 for one that is yet to start.
  std::vector<pid_t> pids() const;

 private:
  struct Slot {
    int rank = 0;
    pid_t pid = 0;  // 0: not yet started
    std::unique_ptr<WorkerOutput> out, err;
    std::string error_file;
    std::optional<WorkerExit> exit;

    std::string state() const;
  };
  enum class Phase {
    kRunning,
    kLingering,  // the workers have ended well, and what they left behind may yet do so
    kStopping,
    kKilling,
  };

  Supervisor(Loop& loop, Console& console, Options options, Events events);
  WorkerLauncher::Events host_events();
  Result<WorkerPipes> add_slot(const WorkerSpec& spec);
  void worker_ended(Slot& slot, int wait_status);
  void start_failed(const Error& error);
  void report_failure(const Slot& slot);
  void finish_when_all_well();
  void end_what_is_left();
  void escalate();
  void note_gone();
  void set_timer(Duration delay, void (Supervisor::*then)());

  Loop& loop_;
  Console& console_;
  Options options_;
  Events events_;
  std::unique_ptr<WorkerLauncher> own_host_;
  WorkerLauncher& host_;
  std::unique_ptr<SignalPipe> signals_;
  std::vector<Slot> slots_;
  std::optional<Error> start_error_;
  Phase phase_ = Phase::kRunning;
  Loop::TimerId timer_ = 0;
  bool starting_ = false, gone_ = false;
};

}  // namespace muster
