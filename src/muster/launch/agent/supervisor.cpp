#include "muster/launch/agent/supervisor.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include "muster/launch/cgroup.h"
#include "muster/launch/signals.h"
#include "muster/launch/workers/spawn_launcher.h"

namespace muster {
namespace {

// Processes that workers leave behind (a tracker, a daemon) may need a moment to notice that the workers are gone.
constexpr Duration kLingerTime = std::chrono::milliseconds(500);

std::string read_file(const std::string& path) {
  constexpr size_t kMax = 1 << 20;
  std::string text(kMax, '\0');
  std::ifstream file(path, std::ios::binary);
  text.resize(static_cast<size_t>(file.read(text.data(), kMax).gcount()));
  return text;
}

}  // namespace

std::string Supervisor::Slot::state() const {
  if (exit) return exit->to_string();
  return pid == 0 ? "starting" : "running";
}

Supervisor::Supervisor(Loop& loop, Console& console, Options options, Events events)
    : console_(console),
      options_(std::move(options)),
      events_(std::move(events)),
      own_launcher_(options_.zygote == nullptr ? std::make_unique<SpawnLauncher>(loop) : nullptr),
      launcher_(own_launcher_ ? *own_launcher_ : *options_.zygote),
      timer_(loop) {}

Result<std::unique_ptr<Supervisor>> Supervisor::create(Loop& loop, Console& console, Options options, Events events) {
  std::unique_ptr<Supervisor> made(new Supervisor(loop, console, std::move(options), std::move(events)));
  auto* self = made.get();
  MUSTER_ASSIGN(self->signals_,
                SignalPipe::open(
                    loop, self->options_.signals, [self](int number) { self->events_.signaled(number); },
                    [self] { self->launcher_.child_ended(); }));
  self->launcher_.attach(self->launcher_events());
  console.on_room([self] {
    for (auto& slot : self->slots_) slot.out->resume(), slot.err->resume();
  });
  return made;
}

Supervisor::~Supervisor() {
  launcher_.attach({});
  console_.on_room({});
}

WorkerLauncher::Events Supervisor::launcher_events() {
  return {
      [this](int rank, pid_t pid) {
        const auto slot = std::ranges::find(slots_, rank, &Slot::rank);
        if (slot != slots_.end()) slot->pid = pid;
      },
      [this](const Error& error) { start_failed(error); },
      [this](pid_t pid, int status) {
        const auto slot = std::ranges::find_if(slots_, [&](const Slot& s) { return s.pid == pid && !s.exit; });
        if (slot != slots_.end()) worker_ended(*slot, status);
      },
      [this] { on_gone(); },
  };
}

Result<WorkerPipes> Supervisor::add_slot(const WorkerSpec& spec) {
  MUSTER_ASSIGN(WorkerPipes pipes, WorkerPipes::open(spec.keeps_stdin));
  const int local_rank = static_cast<int>(slots_.size());
  slots_.push_back({.rank = spec.rank,
                    .out = options_.outputs.open(spec.rank, local_rank, kStdout, std::move(pipes.read_out)),
                    .err = options_.outputs.open(spec.rank, local_rank, kStderr, std::move(pipes.read_err)),
                    .error_file = value_of(spec.environment, "TORCHELASTIC_ERROR_FILE")});
  return pipes;
}

Result<> Supervisor::start(const std::vector<WorkerSpec>& specs) {
  slots_.clear();
  start_error_.reset();
  phase_ = Phase::kRunning;
  gone_ = false;
  oom_kills_ = cgroup_memory(options_.root).oom_kills;
  std::vector<WorkerPipes> pipes;
  for (const auto& spec : specs) {
    MUSTER_ASSIGN(WorkerPipes opened, add_slot(spec));
    pipes.push_back(std::move(opened));
  }
  starting_ = true;
  for (size_t i = 0; i < specs.size() && !start_error_; ++i) launcher_.start(specs[i], std::move(pipes[i]));
  starting_ = false;
  if (start_error_) return tl::unexpected(*start_error_);
  return {};
}

void Supervisor::start_failed(const Error& error) {
  if (start_error_ || phase_ >= Phase::kStopping) return;
  start_error_ = error;
  if (starting_) return;  // start() returns the error
  stop();
  if (events_.start_failed) events_.start_failed(error);
}

void Supervisor::worker_ended(Slot& slot, int wait_status) {
  slot.exit = worker_exit(slot.rank, options_.host, slot.pid, wait_status);
  slot.exit->cause = cause_of(slot);
  slot.out->drain();
  slot.err->drain();
  events_.worker_ended(*slot.exit);
  if (phase_ != Phase::kRunning) return;
  slot.exit->ok() ? finish_when_all_succeeded() : report_failure(slot);
}

std::string Supervisor::cause_of(const Slot& slot) const {
  if (phase_ != Phase::kRunning) return "";  // this launcher kills workers when it stops them
  const int signal = slot.exit->signal;
  if (signal != 0 && signal == slot.expected_signal) return slot.expected_cause;
  if (signal != SIGKILL) return "";
  // The kernel counts a kill before it sends the signal.
  const CgroupMemory memory = cgroup_memory(options_.root);
  return memory.oom_kills > oom_kills_ ? out_of_memory_cause(memory) : "";
}

void Supervisor::report_failure(const Slot& slot) {
  std::map<std::string, std::vector<int>> others;
  std::vector<OutputTail> tails;
  for (auto& other : slots_) {
    if (&other == &slot) continue;
    others[other.state()].push_back(other.rank);
    tails.push_back({other.rank, other.out->tail(), other.err->tail()});
  }
  std::string traceback = last_traceback(slot.err->tail());
  if (traceback.empty()) traceback = error_file_traceback(read_file(slot.error_file));
  const WorkerExit exit = *slot.exit;
  if (!slot.error_file.empty()) write_error_file(slot.error_file, exit, traceback);
  // Before stop(), which may reap other workers: their outputs grow then, and `tails` refers to these outputs.
  std::string report = failure_report(exit, traceback, slot.err->tail(), others) + output_tails(tails);
  stop();
  events_.failed(exit, std::move(report));
}

void Supervisor::finish_when_all_succeeded() {
  if (!std::ranges::all_of(slots_, [](const Slot& slot) { return slot.exit.has_value(); })) return;
  phase_ = Phase::kLingering;
  timer_.start(kLingerTime, [this] { end_leftovers(); });
  events_.succeeded();
}

void Supervisor::end_leftovers() {
  launcher_.list_left([this](const std::vector<ChildProcess>& left) {
    for (const auto& child : left)
      console_.notice(fmt::format("ending a process that the workers left behind: pid {} ({})", child.pid, child.name));
  });
  stop();
}

void Supervisor::expect_end(pid_t pid, int signal, const std::string& cause) {
  const auto slot = std::ranges::find(slots_, pid, &Slot::pid);
  if (slot == slots_.end()) return;
  slot->expected_signal = signal;
  slot->expected_cause = cause;
}

void Supervisor::stop(int number) {
  if (phase_ >= Phase::kStopping || gone_) return;
  phase_ = Phase::kStopping;
  timer_.start(options_.shutdown_timeout, [this, number] { escalate(number); });
  launcher_.terminate(number);
}

void Supervisor::kill() {
  if (gone_) return;
  phase_ = Phase::kStopping;
  timer_.stop();
  launcher_.kill();
}

void Supervisor::escalate(int number) {
  std::vector<int> late;
  for (const auto& slot : slots_)
    if (!slot.exit && slot.pid != 0) late.push_back(slot.rank);
  if (!late.empty())
    console_.notice(fmt::format("killing {} {}: still running {:g} s after {}", late.size() == 1 ? "rank" : "ranks",
                                rank_list(late), std::chrono::duration<double>(options_.shutdown_timeout).count(),
                                signal_name(number)));
  kill();
}

void Supervisor::on_gone() {
  if (phase_ == Phase::kRunning || gone_) return;
  gone_ = true;
  timer_.stop();
  for (auto& slot : slots_) {
    slot.out->finish();
    slot.err->finish();
  }
}

std::vector<pid_t> Supervisor::pids() const {
  std::vector<pid_t> pids;
  for (const auto& slot : slots_) pids.push_back(slot.pid);
  return pids;
}

}  // namespace muster
