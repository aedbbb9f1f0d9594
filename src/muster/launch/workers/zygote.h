#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/io/loop.h"
#include "muster/launch/output/console.h"
#include "muster/launch/workers/spawn_launcher.h"

namespace muster {

/// A process that has imported torch and forks this node's Python workers in milliseconds, again after every restart.
/// It starts to import when it is created, and what is to be started meanwhile waits. Where it turns out not to fit (no
/// torch in that Python, a program that is not Python), workers are started as programs of their own instead.
///
/// One that is killed is replaced. Its end is the end of all that it forked, and it ends when this process does.
class Zygote : public WorkerLauncher {
 public:
  struct Options {
    std::string python;
    std::vector<std::string> preload;  ///< modules to import besides torch
    Environment environment;           ///< what the workers' environments have in common
    bool warm = true;                  ///< whether one that `muster warm` keeps may be used
    bool cold = true;                  ///< whether one is worth starting for this run alone
    bool again = false;                ///< workers may be started again, so that one that was lost is replaced at once
    bool asked = false;                ///< for by the user: not fitting is worth a notice
  };
  /// Whether workers of this command can be forked: `python -u` with a script or a module.
  static bool can_fork(const std::string& python, const std::vector<std::string>& command);

  Zygote(Loop& loop, Console& console, Options options);
  ~Zygote() override;

  void start(const WorkerSpec& spec, WorkerPipes pipes) override;
  void terminate() override;
  void kill() override;
  void list_left(std::function<void(const std::vector<ChildProcess>&)> answer) override;
  void child_ended() override;

 private:
  enum class State { kNone, kImporting, kReady, kSweeping, kUnfit };
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
  void on_left(std::string_view list);
  void start_elsewhere(const std::string& why);
  void lost();
  bool was_killed();
  void finish_sweep();
  void close_channel();
  void end_process();
  void set_timer(Duration delay, std::function<void()> then);

  Loop& loop_;
  Console& console_;
  Options options_;
  SpawnLauncher local_;
  State state_ = State::kNone;
  bool is_warm_ = false;
  Fd channel_;
  pid_t child_ = 0;         // the zygote, where it is this process' child and not reaped
  int child_status_ = 0;    // once it is reaped, as waitpid() has it
  int killed_imports_ = 0;  // since one was ready
  Fd process_;              // its pidfd, once it is ready
  std::deque<Pending> pending_;
  std::map<pid_t, Fd> workers_;  // with their pidfds
  std::optional<Error> refused_;
  std::function<void(const std::vector<ChildProcess>&)> left_;
  Loop::TimerId timer_ = 0;
};

}  // namespace muster
