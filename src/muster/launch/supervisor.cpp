#include "muster/launch/supervisor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>

#include "muster/launch/process_tree.h"

namespace muster {
namespace {

// What workers leave behind (a tracker, a daemon) may need a moment to notice that they are gone.
constexpr Duration kLingerTime = std::chrono::milliseconds(500);
constexpr Duration kKillPause = std::chrono::milliseconds(10);

std::string read_file(const std::string& path) {
  constexpr size_t kMax = 1 << 20;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMax, '\0');
  file.read(text.data(), kMax);
  text.resize(static_cast<size_t>(std::max<std::streamsize>(0, file.gcount())));
  return text;
}

}  // namespace

Result<std::unique_ptr<Supervisor>> Supervisor::create(Loop& loop, Console& console, Options options, Events events) {
  std::unique_ptr<Supervisor> made(new Supervisor(loop, console, std::move(options), std::move(events)));
  MUSTER_ASSIGN(made->signals_, SignalPipe::open({SIGINT, SIGTERM, SIGHUP, SIGCHLD}));
  auto* self = made.get();
  MUSTER_TRY(loop.watch(self->signals_->fd(), EPOLLIN, [self](uint32_t) { self->on_signals(); }));
  console.on_room([self] {
    for (auto& slot : self->slots_) slot.out->resume(), slot.err->resume();
  });
  return made;
}

Supervisor::~Supervisor() {
  if (timer_ != 0) loop_.cancel(timer_);
  console_.on_room({});
  if (signals_) loop_.unwatch(signals_->fd());
}

Fd Supervisor::open_log(int rank, const char* stream) {
  if (options_.log_dir.empty()) return Fd();
  const std::string path = fmt::format("{}/rank_{}.{}.log", options_.log_dir, rank, stream);
  Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file) console_.notice(fmt::format("cannot write {}: {}", path, std::generic_category().message(errno)));
  return file;
}

Result<> Supervisor::start(const std::vector<WorkerSpec>& specs) {
  for (const auto& spec : specs) {
    MUSTER_ASSIGN(WorkerProcess process, spawn(spec));
    const std::string prefix = rank_prefix(spec.rank, console_.colour());
    Slot slot{spec.rank, process.pid};
    slot.out = std::make_unique<WorkerOutput>(loop_, console_, console_.out(), std::move(process.out), prefix,
                                              open_log(spec.rank, "stdout"));
    slot.err = std::make_unique<WorkerOutput>(loop_, console_, console_.err(), std::move(process.err), prefix,
                                              open_log(spec.rank, "stderr"));
    if (const auto found = spec.environment.find("TORCHELASTIC_ERROR_FILE"); found != spec.environment.end())
      slot.error_file = found->second;
    slots_.push_back(std::move(slot));
  }
  return {};
}

void Supervisor::on_signals() {
  bool child_ended = false;
  for (int number = 0; (number = signals_->take()) != 0;) {
    if (number == SIGCHLD) {
      child_ended = true;
    } else {
      events_.signalled(number);
    }
  }
  if (child_ended) reap();
}

void Supervisor::reap() {
  int status = 0;
  pid_t pid = 0;
  while ((pid = ::waitpid(-1, &status, WNOHANG)) > 0) {
    signalled_orphans_.erase(pid);
    const auto slot =
        std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.pid == pid && !s.exit; });
    if (slot != slots_.end()) worker_ended(*slot, status);
  }
  const bool childless = pid < 0 && errno == ECHILD;
  if (phase_ == Phase::kStopping) signal_orphans(SIGTERM);
  if (childless) note_gone();
}

void Supervisor::worker_ended(Slot& slot, int wait_status) {
  slot.exit = worker_exit(slot.rank, options_.host, slot.pid, wait_status);
  slot.out->drain();
  slot.err->drain();
  events_.worker_ended(*slot.exit);
  if (phase_ != Phase::kRunning) return;
  if (!slot.exit->ok()) {
    report_failure(slot);
  } else {
    finish_when_all_well();
  }
}

void Supervisor::report_failure(const Slot& slot) {
  std::map<std::string, std::vector<int>> others;
  for (const auto& other : slots_) {
    if (&other == &slot) continue;
    others[other.exit ? other.exit->to_string() : "running"].push_back(other.rank);
  }
  std::string traceback = last_traceback(slot.err->tail());
  if (traceback.empty()) traceback = error_file_traceback(read_file(slot.error_file));
  const WorkerExit exit = *slot.exit;
  stop();
  events_.failed(exit, failure_report(exit, traceback, others));
}

void Supervisor::finish_when_all_well() {
  if (!std::all_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.exit.has_value(); })) return;
  phase_ = Phase::kLingering;
  timer_ = loop_.after(kLingerTime, [this] {
    phase_ = Phase::kStopping;
    const auto left = running_children();
    for (const auto& child : left)
      console_.notice(fmt::format("ending a process that the workers left behind: pid {} ({})", child.pid, child.name));
    signal_orphans(SIGTERM);
    timer_ = loop_.after(options_.shutdown_timeout, [this] { escalate(); });
  });
  events_.all_well();
}

void Supervisor::stop() {
  if (phase_ >= Phase::kStopping || gone_) return;
  phase_ = Phase::kStopping;
  if (timer_ != 0) loop_.cancel(timer_);
  signal_workers(SIGTERM);
  signal_orphans(SIGTERM);
  timer_ = loop_.after(options_.shutdown_timeout, [this] { escalate(); });
  reap();
}

void Supervisor::kill() {
  if (gone_) return;
  phase_ = Phase::kKilling;
  if (timer_ != 0) loop_.cancel(timer_);
  keep_killing();
}

void Supervisor::escalate() {
  std::vector<int> late;
  for (const auto& slot : slots_)
    if (!slot.exit) late.push_back(slot.rank);
  if (!late.empty())
    console_.notice(fmt::format("killing {} {}: still there {:g} s after SIGTERM", late.size() == 1 ? "rank" : "ranks",
                                rank_list(late), std::chrono::duration<double>(options_.shutdown_timeout).count()));
  kill();
}

// An orphan becomes visible here when its parent has died, and of that nobody is told: so this looks again and again.
void Supervisor::keep_killing() {
  signal_workers(SIGKILL);
  for (const auto& child : running_children()) ::kill(child.pid, SIGKILL);
  reap();
  if (!gone_) timer_ = loop_.after(kKillPause, [this] { keep_killing(); });
}

void Supervisor::signal_workers(int number) {
  for (const auto& slot : slots_) {
    // The group outlives its leader while a member is left, and no other process can get its number meanwhile. Once
    // all are gone the number is free: so only groups whose leader is not reaped, and orphans one by one.
    if (slot.exit) continue;
    ::kill(-slot.pid, number);
    if (number != SIGKILL) ::kill(-slot.pid, SIGCONT);  // a stopped process would never see it
  }
}

void Supervisor::signal_orphans(int number) {
  for (const auto& child : running_children()) {
    const bool worker = std::any_of(slots_.begin(), slots_.end(),
                                    [&](const Slot& slot) { return slot.pid == child.pid && !slot.exit; });
    if (worker || !signalled_orphans_.insert(child.pid).second) continue;
    ::kill(child.pid, number);
    ::kill(child.pid, SIGCONT);
  }
}

void Supervisor::note_gone() {
  if (phase_ == Phase::kRunning || gone_) return;
  gone_ = true;
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = 0;
  for (auto& slot : slots_) {
    slot.out->drain();
    slot.err->drain();
    slot.out->finish();
    slot.err->finish();
  }
}

}  // namespace muster
