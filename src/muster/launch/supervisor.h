#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "muster/io/loop.h"
#include "muster/launch/console.h"
#include "muster/launch/failure.h"
#include "muster/launch/signals.h"
#include "muster/launch/worker.h"
#include "muster/launch/worker_output.h"

namespace muster {

/// Starts this node's workers, passes their output on, waits for them and ends them. Everything runs on the thread that
/// drives the loop; the process must have called adopt_orphans(), and has no other children.
class Supervisor {
 public:
  struct Options {
    std::string host;
    std::string log_dir;        ///< empty: none
    Duration shutdown_timeout;  ///< between SIGTERM and SIGKILL
  };
  struct Events {
    std::function<void(const WorkerExit&)> worker_ended;
    /// A worker has failed, for the first time: what to tell about it. Not after stop().
    std::function<void(const WorkerExit&, std::string report)> failed;
    /// All workers have ended well.
    std::function<void()> all_well;
    /// SIGINT, SIGTERM or SIGHUP: what to do is the agent's affair.
    std::function<void(int)> signalled;
  };

  static Result<std::unique_ptr<Supervisor>> create(Loop& loop, Console& console, Options options, Events events);
  ~Supervisor();

  /// The first that cannot be started is the error; those before it are running then.
  Result<> start(const std::vector<WorkerSpec>& specs);
  /// SIGTERM to every worker's process group and to what the workers left behind; SIGKILL after the shutdown timeout.
  void stop();
  /// SIGKILL to all, now.
  void kill();
  /// No process of this node's is left.
  bool gone() const { return gone_; }

 private:
  struct Slot {
    int rank;
    pid_t pid;
    std::unique_ptr<WorkerOutput> out, err;
    std::string error_file;
    std::optional<WorkerExit> exit;
  };
  enum class Phase {
    kRunning,
    kLingering,  // the workers have ended well, and what they left behind may yet do so
    kStopping,
    kKilling,
  };

  Supervisor(Loop& loop, Console& console, Options options, Events events)
      : loop_(loop), console_(console), options_(std::move(options)), events_(std::move(events)) {}
  Fd open_log(int rank, const char* stream);
  void on_signals();
  void reap();
  void worker_ended(Slot& slot, int wait_status);
  void report_failure(const Slot& slot);
  void finish_when_all_well();
  void signal_workers(int number);
  void signal_orphans(int number);
  void escalate();
  void keep_killing();
  void note_gone();

  Loop& loop_;
  Console& console_;
  Options options_;
  Events events_;
  std::unique_ptr<SignalPipe> signals_;
  std::vector<Slot> slots_;
  std::set<pid_t> signalled_orphans_;
  Phase phase_ = Phase::kRunning;
  Loop::TimerId timer_ = 0;
  bool gone_ = false;
};

}  // namespace muster
