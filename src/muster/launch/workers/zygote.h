#pragma once

#include <deque>
#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "muster/io/loop.h"
#include "muster/launch/output/console.h"
#include "muster/launch/timer.h"
#include "muster/launch/workers/spawn_launcher.h"

namespace muster {

/// A process that has imported torch and forks this node's Python workers in milliseconds, also after restarts. The
/// import starts when this object is created, and workers wait until it is done. If a zygote cannot be used (there is
/// no torch in that Python, or the program is not Python), workers are spawned instead.
///
/// A killed zygote is replaced. All its workers end when it ends, and it ends when this process ends.
///
/// It has more than 12 fields and 15 private functions, because one process has a protocol, a start, a loss and a
/// fallback.
class Zygote : public WorkerLauncher {
 public:
  struct Options {
    std::string python;
    std::vector<std::string> preload;  ///< modules to import besides torch
    Environment environment;           ///< the variables that all workers share
    bool warm = true;                  ///< the zygote of `muster warm` may be used
    bool cold = true;                  ///< a zygote may be started for this run
    bool again = false;                ///< workers may be started again: a lost zygote is replaced at once
    bool asked = false;                ///< the user asked for a zygote: a fallback is reported
  };
  /// True if workers with this command can be forked: `python -u` with a script or a module.
  static bool can_fork(const std::string& python, const std::vector<std::string>& command);

  Zygote(Loop& loop, Console& console, Options options);
  ~Zygote() override;

  void start(const WorkerSpec& spec, WorkerPipes pipes) override;
  void signal(int number) override;
  void terminate(int number) override;
  void kill() override;
  void list_left(std::function<void(const std::vector<ChildProcess>&)> answer) override;
  void child_ended() override;

 private:
  enum class State { kNone, kImporting, kReady, kSweeping, kFallback };
  struct Pending {
    WorkerSpec spec;
    WorkerPipes pipes;
    bool sent = false;
  };

  void launch();
  Result<> launch_warm();
  Result<> launch_cold();
  Result<Fd> open_channel();
  void send_pending();
  Result<> send_start(const Pending& worker);
  bool stop_before_start();
  void on_readable();
  void on_message(const std::string& text);
  void on_started(int rank, pid_t pid);
  void on_left(std::istream& list);
  void fall_back_to_spawn(const std::string& why);
  void on_lost();
  bool was_killed();
  void finish_sweep();
  void close_channel();
  void end_process();

  Loop& loop_;
  Console& console_;
  Options options_;
  SpawnLauncher local_;
  State state_ = State::kNone;
  bool is_warm_ = false;
  Fd channel_;
  pid_t child_ = 0;         // the zygote, if it is a child of this process and not reaped
  int child_status_ = 0;    // after it was reaped, as waitpid() reports it
  int killed_imports_ = 0;  // imports in a row that were killed
  Fd process_;              // pidfd of the zygote
  std::deque<Pending> pending_;
  std::map<pid_t, Fd> workers_;  // pidfds of the workers
  std::optional<Error> refused_;
  std::function<void(const std::vector<ChildProcess>&)> on_left_;
  Timer timer_{loop_};
};

}  // namespace muster
