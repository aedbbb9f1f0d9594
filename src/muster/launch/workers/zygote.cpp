// The protocol of the agent and the zygote, over a SOCK_SEQPACKET socket:
//
//   agent to zygote                                zygote to agent
//   start RANK   with descriptors (below)          ready PID           torch is imported
//   signal N     signal N to all workers           started RANK PID    the agent can close the worker's descriptors
//   term N       N=15: SIGTERM to their groups,    failed RANK TEXT    the worker could not be started
//                else as `signal N`; SIGTERM       ended PID STATUS    as waitpid() reports it
//                to orphans as they appear         left {PID NL NAME NL}
//   kill         SIGKILL until nothing is left     empty               no process is left
//   left         list processes besides workers    unfit TEXT          spawn workers instead; the zygote ends
//                                                  refused TEXT        a module fails after a fork; the zygote ends
//
// A start has these descriptors: a file, and the worker's standard input, output and error. The file holds words that
// end with NUL: the CPUs to run on, separated by commas (or none), the number of words of the command, these words, and
// NAME=VALUE for each variable of the environment. RANK is returned unchanged. When the socket is closed, the zygote
// and all its workers end.

#include "muster/launch/workers/zygote.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <iterator>
#include <sstream>

#include "muster/base/log.h"
#include "muster/launch/process_tree.h"
#include "muster/launch/workers/warm.h"
#include "muster/launch/workers/zygote_program.h"

namespace muster {
namespace {

constexpr Duration kStuckTime = std::chrono::seconds(5);  // for a zygote to kill all its workers
constexpr Duration kWarmTime = std::chrono::seconds(20);  // for a warm zygote to answer
constexpr Duration kRetryTime = std::chrono::milliseconds(2);
constexpr Duration kSweepPause = std::chrono::milliseconds(10);
constexpr int kMaxKilledImports = 3;  // in a row

std::string payload(const WorkerSpec& spec) {
  std::string text = fmt::format("{}", fmt::join(spec.cpus, ",")) + '\0';
  text += std::to_string(spec.command.size()) + '\0';
  for (const auto& word : spec.command) text += word + '\0';
  for (const auto& [name, value] : spec.environment) text += name + "=" + value + '\0';
  return text;
}

// Returns the next number of a message; 0 if it is not a number.
int take_number(std::istream& message) {
  int number = 0;
  message >> number;
  return number;
}

// Returns the text after the words that were taken.
std::string take_text(std::istream& message) { return {std::istreambuf_iterator<char>(message.ignore()), {}}; }

}  // namespace

bool Zygote::can_fork(const std::string& python, const std::vector<std::string>& command) {
  if (command.size() < 3 || command[0] != python || command[1] != "-u") return false;
  const bool flag = command[2].starts_with('-');
  return !flag || (command.size() > 3 && (command[2] == "-m" || command[2] == "-c"));
}

Zygote::Zygote(Loop& loop, Console& console, Options options)
    : loop_(loop), console_(console), options_(std::move(options)), local_(loop) {
  local_.attach({
      [this](int rank, pid_t pid) { events_.started(rank, pid); },
      [this](const Error& error) { events_.failed(error); },
      [this](pid_t pid, int status) { events_.ended(pid, status); },
      [this] {
        if (state_ == State::kSweeping) return finish_sweep();
        events_.empty();
      },
  });
  launch();
}

Zygote::~Zygote() {
  close_channel();
  end_process();
}

void Zygote::launch() {
  state_ = State::kImporting;
  if (options_.warm) {
    const auto warm = launch_warm();
    is_warm_ = warm.has_value();
    if (is_warm_) return;
    log(LogLevel::kDebug, "no warm zygote: " + warm.error().message);
  }
  is_warm_ = false;
  if (!options_.cold) return fall_back_to_spawn("one worker gains nothing from it");
  if (const auto started = launch_cold(); !started) fall_back_to_spawn(started.error().message);
}

// Opens the channel and returns the zygote's end.
Result<Fd> Zygote::open_channel() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
    return fail_errno(errno, "cannot make a socket for the zygote");
  channel_.reset(ends[0]);
  Fd other(ends[1]);
  MUSTER_TRY(loop_.watch(channel_.get(), EPOLLIN, [this](uint32_t) { on_readable(); }));
  return other;
}

// Does not wait: a "ready" message follows, or the end of the channel.
Result<> Zygote::launch_warm() {
  MUSTER_ASSIGN(const std::string path, warm_path({options_.python, options_.preload, options_.environment}));
  MUSTER_ASSIGN(const Fd socket, connect_warm(path));
  MUSTER_ASSIGN(const Fd other, open_channel());
  MUSTER_TRY(send_message(socket.get(), "run", {other.get(), STDERR_FILENO}));
  timer_.start(kWarmTime, [this] { on_lost(); });
  return {};
}

Result<> Zygote::launch_cold() {
  close_channel();
  MUSTER_ASSIGN(const Fd other, open_channel());
  ZygoteStart start{options_.python, {"cold"}, options_.environment, other.get(), STDERR_FILENO};
  start.args.insert(start.args.end(), options_.preload.begin(), options_.preload.end());
  MUSTER_ASSIGN(child_, start_zygote(start));
  process_ = open_process(child_);
  child_status_ = 0;
  return {};
}

void Zygote::start(const WorkerSpec& spec, WorkerPipes pipes) {
  if (refused_) return events_.failed(*refused_);
  if (state_ == State::kNone) launch();
  if (state_ != State::kFallback && !can_fork(options_.python, spec.command))
    fall_back_to_spawn("the program is not Python");
  if (state_ == State::kFallback) return local_.start(spec, std::move(pipes));
  pending_.push_back({spec, std::move(pipes)});
  if (state_ == State::kReady) send_pending();
}

void Zygote::send_pending() {
  for (auto& worker : pending_) {
    if (worker.sent) continue;
    const auto sent = send_start(worker);
    if (!sent && sent.error().code == ErrorCode::kUnavailable)  // the socket's buffer is full
      return timer_.start(kRetryTime, [this] { send_pending(); });
    if (!sent) return on_lost();
    worker.sent = true;
  }
}

Result<> Zygote::send_start(const Pending& worker) {
  MUSTER_ASSIGN(const Fd file, memory_file(payload(worker.spec)));
  const auto& pipes = worker.pipes;
  return send_message(channel_.get(), fmt::format("start {}", worker.spec.rank),
                      {file.get(), pipes.in.get(), pipes.out.get(), pipes.err.get()});
}

// Drops the workers that were not sent to the zygote yet. Returns true if there are no workers to end.
bool Zygote::stop_before_start() {
  std::erase_if(pending_, [](const Pending& worker) { return !worker.sent; });
  if (state_ != State::kImporting && state_ != State::kNone) return false;
  events_.empty();
  return true;
}

void Zygote::signal(int number) {
  if (state_ == State::kFallback) return local_.signal(number);
  if (state_ == State::kReady) (void)send_message(channel_.get(), fmt::format("signal {}", number));
}

void Zygote::terminate(int number) {
  if (state_ == State::kFallback) return local_.terminate(number);
  if (state_ == State::kSweeping || stop_before_start()) return;
  if (!send_message(channel_.get(), fmt::format("term {}", number))) on_lost();
}

void Zygote::kill() {
  if (state_ == State::kFallback) return local_.kill();
  if (state_ == State::kSweeping || stop_before_start()) return;
  if (!send_message(channel_.get(), "kill")) return on_lost();
  timer_.start(kStuckTime, [this] {
    log(LogLevel::kWarning, "the zygote does not end its workers: killing both");
    on_lost();
  });
}

void Zygote::list_left(std::function<void(const std::vector<ChildProcess>&)> answer) {
  if (state_ == State::kFallback) return local_.list_left(std::move(answer));
  on_left_ = std::move(answer);
  if (state_ == State::kReady) (void)send_message(channel_.get(), "left");
}

void Zygote::child_ended() {
  if (state_ == State::kFallback || state_ == State::kSweeping) return local_.child_ended();
  for (const auto& child : reap_children().ended)
    if (child.pid == child_) child_status_ = child.status, child_ = 0;
}

// True if SIGKILL ended the zygote. Call it after the zygote has closed its end of the channel.
bool Zygote::was_killed() {
  if (has_ended(process_, kStuckTime)) child_ended();
  return child_ == 0 && WIFSIGNALED(child_status_) && WTERMSIG(child_status_) == SIGKILL;
}

void Zygote::on_readable() {
  while (channel_) {
    const auto text = receive_message(channel_.get());
    if (text) {
      on_message(*text);
    } else if (text.error().code == ErrorCode::kUnavailable) {
      return;
    } else {
      return on_lost();
    }
  }
}

void Zygote::on_message(const std::string& text) {
  std::istringstream message(text);
  std::string verb;
  message >> verb;
  if (verb == "ready") {
    timer_.stop();
    state_ = State::kReady;
    killed_imports_ = 0;
    process_ = open_process(take_number(message));
    send_pending();
  } else if (verb == "started") {
    const int rank = take_number(message);
    on_started(rank, take_number(message));
  } else if (verb == "failed") {
    const int rank = take_number(message);
    std::erase_if(pending_, [&](const Pending& worker) { return worker.spec.rank == rank; });
    events_.failed({ErrorCode::kResourceExhausted, fmt::format("rank {} was not started: {}", rank, take_text(message)),
                    rank, ""});
  } else if (verb == "ended") {
    const pid_t pid = take_number(message);
    workers_.erase(pid);
    events_.ended(pid, take_number(message));
  } else if (verb == "left") {
    on_left(message);
  } else if (verb == "empty") {
    timer_.stop();
    events_.empty();
  } else if (verb == "unfit") {
    fall_back_to_spawn(take_text(message));
  } else if (verb == "refused") {
    refused_ = Error{ErrorCode::kInvalidArgument, take_text(message), kNoRank, ""};
    close_channel();
    state_ = State::kNone;
    const bool waited_for = !pending_.empty();
    pending_.clear();
    if (waited_for) events_.failed(*refused_);
  }
}

void Zygote::on_started(int rank, pid_t pid) {
  std::erase_if(pending_, [&](const Pending& worker) { return worker.spec.rank == rank; });
  workers_[pid] = open_process(pid);
  events_.started(rank, pid);
}

void Zygote::on_left(std::istream& list) {
  std::vector<ChildProcess> left;
  for (ChildProcess child; list >> child.pid && std::getline(list.ignore(), child.name);) left.push_back(child);
  if (auto answer = std::exchange(on_left_, {})) answer(left);
}

void Zygote::fall_back_to_spawn(const std::string& why) {
  // A warm zygote that cannot serve this run is replaced by a zygote that this process starts.
  if (is_warm_ && state_ == State::kImporting) {
    log(LogLevel::kDebug, "not from the warm zygote: " + why);
    options_.warm = false;
    timer_.stop();
    close_channel();
    return launch();
  }
  const std::string text = "starting workers without the zygote: " + why;
  options_.asked ? console_.notice(text) : log(LogLevel::kDebug, text);
  close_channel();
  end_process();
  state_ = State::kFallback;
  for (auto& worker : std::exchange(pending_, {})) local_.start(worker.spec, std::move(worker.pipes));
}

// The zygote is gone or does not answer.
void Zygote::on_lost() {
  close_channel();
  if (state_ == State::kImporting) {
    // A zygote that was killed is started again, but not without a limit.
    if (is_warm_ || !was_killed() || ++killed_imports_ == kMaxKilledImports || !launch_cold())
      fall_back_to_spawn("it ended while it imported torch");
    return;
  }
  end_process();
  state_ = State::kSweeping;
  std::vector<pid_t> pids;
  for (const auto& [pid, process] : workers_) {
    signal_process(process, SIGKILL);
    pids.push_back(pid);
  }
  const bool waited_for = !std::exchange(pending_, {}).empty();
  if (waited_for || !pids.empty()) console_.notice("the zygote was killed, and its workers with it");
  for (const pid_t pid : pids) events_.ended(pid, SIGKILL);
  if (waited_for)
    events_.failed({ErrorCode::kAborted, "the zygote ended before it had started all workers", kNoRank, ""});
  local_.kill();  // orphans are children of this process now, or of a warm zygote's parent
}

// This process has no more children. Workers of a warm zygote are not its children, but the kernel kills them as well.
void Zygote::finish_sweep() {
  std::erase_if(workers_, [](const auto& worker) { return has_ended(worker.second); });
  if (!workers_.empty()) return timer_.start(kSweepPause, [this] { finish_sweep(); });
  timer_.stop();
  state_ = State::kNone;
  if (options_.again) launch();  // the new zygote imports while other nodes stop their workers
  events_.empty();
}

void Zygote::close_channel() {
  if (channel_) loop_.unwatch(channel_.get());
  channel_.reset();
}

void Zygote::end_process() {
  signal_process(process_, SIGKILL);
  (void)has_ended(process_, kStuckTime);  // no process may outlive its run, not even the child of a warm zygote
  process_.reset();
  if (child_ != 0) {
    ::kill(child_, SIGKILL);
    reap_child(child_);
  }
  child_ = 0;
}

}  // namespace muster
