#include "muster/launch/agent/worker_timers.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "muster/launch/process_tree.h"

namespace muster {
namespace {

constexpr size_t kMaxTimers = 512;   // each one needs a descriptor
constexpr double kMaxSeconds = 1e9;  // so that a timer fits in a Duration

bool is_pipe(const std::string& path) {
  struct stat file {};
  return ::lstat(path.c_str(), &file) == 0 && S_ISFIFO(file.st_mode);
}

// True if a process reads this pipe: the launcher of an outer job, whose workers have its path.
bool is_served(const std::string& path) {
  return is_pipe(path) && Fd(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC));
}

// Makes a pipe that only this user can open. Replaces the pipe of a launcher that was killed, but no other file.
Result<Fd> make_pipe(const std::string& path) {
  if (is_pipe(path)) ::unlink(path.c_str());
  if (::mkfifo(path.c_str(), 0600) != 0) return fail_errno(errno, "cannot make the timers' pipe " + path);
  // It is open for writing as well, so that it has no end when no worker writes.
  Fd pipe(::open(path.c_str(), O_RDWR | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC));
  if (!pipe) return fail_errno(errno, "cannot open the timers' pipe " + path);
  return pipe;
}

bool is_same_file(const std::string& path, const Fd& pipe) {
  struct stat named {};
  struct stat opened {};
  return ::lstat(path.c_str(), &named) == 0 && ::fstat(pipe.get(), &opened) == 0 && named.st_dev == opened.st_dev &&
         named.st_ino == opened.st_ino;
}

struct TimerRequest {
  pid_t pid = 0;
  std::string scope;
  double time = 0;  // in seconds since 1970; negative: remove the timer
  int signal = 0;
};

// Nothing if the line is not a request.
std::optional<TimerRequest> parse_request(std::string_view line) {
  using nlohmann::json;
  const auto request = json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto has = [&](const char* name, bool (json::*is)() const noexcept) {
    const auto field = request.find(name);
    return field != request.end() && ((*field).*is)();
  };
  if (!request.is_object() || !has("pid", &json::is_number_unsigned) || !has("scope_id", &json::is_string) ||
      !has("expiration_time", &json::is_number) || !has("signal", &json::is_number_integer))
    return std::nullopt;
  const auto pid = request["pid"].get<uint64_t>();
  const auto signal = request["signal"].get<int64_t>();
  if (pid == 0 || pid > INT_MAX || signal > SIGRTMAX) return std::nullopt;
  return TimerRequest{static_cast<pid_t>(pid), request["scope_id"].get<std::string>(),
                      request["expiration_time"].get<double>(), static_cast<int>(std::max<int64_t>(signal, 0))};
}

double now_in_seconds() {
  // tidy: allow(clock) requests have the time of the system clock
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Result<std::unique_ptr<WorkerTimers>> WorkerTimers::from_environment(Loop& loop, const Environment& environment,
                                                                     const std::string& scratch, Events events) {
  if (value_of(environment, "TORCHELASTIC_ENABLE_FILE_TIMER") != "1") return nullptr;
  std::string path = value_of(environment, "TORCHELASTIC_TIMER_FILE");
  if (path.empty() || is_served(path)) path = scratch + "/timers";
  MUSTER_ASSIGN(Fd pipe, make_pipe(path));
  std::unique_ptr<WorkerTimers> timers(new WorkerTimers(loop, std::move(path), std::move(pipe), std::move(events)));
  auto* self = timers.get();
  MUSTER_TRY(loop.watch(self->pipe_.get(), EPOLLIN, [self](uint32_t) { self->read(); }));
  return timers;
}

WorkerTimers::WorkerTimers(Loop& loop, std::string path, Fd pipe, Events events)
    : loop_(loop), path_(std::move(path)), pipe_(std::move(pipe)), events_(std::move(events)) {}

WorkerTimers::~WorkerTimers() {
  loop_.unwatch(pipe_.get());
  if (is_same_file(path_, pipe_)) ::unlink(path_.c_str());
}

void WorkerTimers::read() {
  std::array<char, PIPE_BUF> piece;
  const ssize_t n = ::read(pipe_.get(), piece.data(), piece.size());
  if (n <= 0) return;
  text_.append(piece.data(), static_cast<size_t>(n));
  size_t begin = 0;
  for (size_t end = 0; (end = text_.find('\n', begin)) != std::string::npos; begin = end + 1)
    take(std::string_view(text_).substr(begin, end - begin));
  text_.erase(0, begin);
  // A worker writes a request at once, and the kernel does not mix writes of this size.
  if (text_.size() > PIPE_BUF) {
    refuse(fmt::format("a request of more than {} bytes", PIPE_BUF));
    text_.clear();
  }
  wait_for_next();
}

void WorkerTimers::take(std::string_view line) {
  const auto request = parse_request(line);
  if (!request) return refuse(fmt::format("'{:.200}' is not a request for a timer", line));
  const std::pair key(request->pid, request->scope);
  timers_.erase(key);
  if (request->time < 0) return;
  Fd process = open_process(request->pid);
  if (!process && errno == ESRCH) return;  // it has ended
  if (!process) return refuse(fmt::format("cannot watch process {}: {}", request->pid, std::strerror(errno)));
  if (timers_.size() >= kMaxTimers) std::erase_if(timers_, [](const auto& t) { return has_ended(t.second.process); });
  if (timers_.size() >= kMaxTimers) return refuse(fmt::format("there are {} timers already", kMaxTimers));
  const std::chrono::duration<double> left(std::clamp(request->time - now_in_seconds(), 0.0, kMaxSeconds));
  const TimePoint at = loop_.clock().now() + std::chrono::duration_cast<Duration>(left);
  timers_[key] = {std::move(process), at, request->signal};
}

void WorkerTimers::refuse(const std::string& why) { events_.notice(fmt::format("timers of {}: {}", path_, why)); }

void WorkerTimers::wait_for_next() {
  const auto first =
      std::ranges::min_element(timers_, {}, [](const auto& timer) -> const TimePoint& { return timer.second.at; });
  if (first == timers_.end()) return next_.stop();
  next_.start(std::max(Duration::zero(), first->second.at - loop_.clock().now()), [this] { expire(); });
}

void WorkerTimers::expire() {
  const TimePoint now = loop_.clock().now();
  for (auto timer = timers_.begin(); timer != timers_.end();) {
    auto& [key, pending] = *timer;
    if (pending.at > now) {
      ++timer;
      continue;
    }
    if (!has_ended(pending.process)) {
      events_.expired({key.first, key.second, pending.signal});
      if (pending.signal != 0) signal_process(pending.process, pending.signal);
    }
    timer = timers_.erase(timer);
  }
  wait_for_next();
}

}  // namespace muster
