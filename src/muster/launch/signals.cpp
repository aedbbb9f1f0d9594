#include "muster/launch/signals.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <csignal>
#include <utility>

namespace muster {
namespace {

// sigabbrev_np() would know them, but glibc has it only since 2.32.
constexpr std::array<std::pair<int, std::string_view>, 31> kSignals{{
    {SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},       {SIGQUIT, "SIGQUIT"},   {SIGILL, "SIGILL"},   {SIGTRAP, "SIGTRAP"},
    {SIGABRT, "SIGABRT"}, {SIGBUS, "SIGBUS"},       {SIGFPE, "SIGFPE"},     {SIGKILL, "SIGKILL"}, {SIGUSR1, "SIGUSR1"},
    {SIGSEGV, "SIGSEGV"}, {SIGUSR2, "SIGUSR2"},     {SIGPIPE, "SIGPIPE"},   {SIGALRM, "SIGALRM"}, {SIGTERM, "SIGTERM"},
    {SIGCHLD, "SIGCHLD"}, {SIGSTKFLT, "SIGSTKFLT"}, {SIGCONT, "SIGCONT"},   {SIGSTOP, "SIGSTOP"}, {SIGTSTP, "SIGTSTP"},
    {SIGTTIN, "SIGTTIN"}, {SIGTTOU, "SIGTTOU"},     {SIGURG, "SIGURG"},     {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"},
    {SIGPROF, "SIGPROF"}, {SIGVTALRM, "SIGVTALRM"}, {SIGWINCH, "SIGWINCH"}, {SIGPOLL, "SIGPOLL"}, {SIGPWR, "SIGPWR"},
    {SIGSYS, "SIGSYS"},
}};

std::atomic<int> write_end{-1};  // a signal handler can reach only globals; set before the handlers, reset after

void on_signal(int number) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(number);
  [[maybe_unused]] const auto written = ::write(write_end.load(), &byte, 1);
  errno = saved;
}

}  // namespace

std::string signal_name(int number) {
  for (const auto& [known, name] : kSignals)
    if (known == number) return std::string(name);
  if (number >= SIGRTMIN && number <= SIGRTMAX) return "SIGRTMIN+" + std::to_string(number - SIGRTMIN);
  return "signal " + std::to_string(number);
}

std::optional<int> signal_number(std::string_view name) {
  std::string upper(name);
  for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  if (!upper.starts_with("SIG")) upper.insert(0, "SIG");
  for (const auto& [number, known] : kSignals)
    if (known == upper) return number;
  return std::nullopt;
}

std::vector<int> handled_signals(std::vector<int> ending) {
  for (const int number : kForwardedSignals)
    if (std::ranges::find(ending, number) == ending.end()) ending.push_back(number);
  return ending;
}

Result<std::unique_ptr<SignalPipe>> SignalPipe::open(Loop& loop, std::vector<int> signals,
                                                     std::function<void(int)> signaled,
                                                     std::function<void()> child_ended) {
  std::array<int, 2> ends{};
  // Non-blocking, because a signal handler must not wait for room in the pipe.
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) return fail_errno(errno, "cannot create a pipe for signals");
  signals.push_back(SIGCHLD);
  std::unique_ptr<SignalPipe> made(new SignalPipe(loop, Fd(ends[0]), Fd(ends[1]), std::move(signals)));
  write_end = ends[1];
  for (const int number : made->signals_) {
    struct sigaction action {
    }, old{};
    action.sa_handler = on_signal;  // no SA_RESTART, so a signal interrupts a write that blocks
    ::sigaction(number, nullptr, &old);
    if (old.sa_handler != SIG_IGN || number == SIGCHLD) ::sigaction(number, &action, nullptr);
  }
  MUSTER_TRY(loop.watch(ends[0], EPOLLIN,
                        [self = made.get(), signaled = std::move(signaled),
                         child_ended = std::move(child_ended)](uint32_t) { self->dispatch(signaled, child_ended); }));
  return made;
}

SignalPipe::~SignalPipe() {
  loop_.unwatch(read_.get());
  for (const int number : signals_) {
    struct sigaction old {};
    ::sigaction(number, nullptr, &old);
    if (old.sa_handler == on_signal) ::signal(number, SIG_DFL);
  }
  write_end = -1;
}

void SignalPipe::dispatch(const std::function<void(int)>& signaled, const std::function<void()>& child_ended) const {
  bool has_ended_child = false;
  for (unsigned char number = 0; ::read(read_.get(), &number, 1) == 1;) {
    if (number == SIGCHLD) {
      has_ended_child = true;
    } else {
      signaled(number);
    }
  }
  if (has_ended_child) child_ended();
}

}  // namespace muster
