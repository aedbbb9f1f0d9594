#include "muster/launch/signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>

namespace muster {
namespace {

std::atomic<int> write_end{-1};  // a signal handler can reach nothing else

void note(int number) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(number);
  [[maybe_unused]] const auto written = ::write(write_end.load(), &byte, 1);
  errno = saved;
}

}  // namespace

Result<std::unique_ptr<SignalPipe>> SignalPipe::open(std::vector<int> signals) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) return fail_errno(errno, "cannot make a pipe for signals");
  std::unique_ptr<SignalPipe> made(new SignalPipe(Fd(ends[0]), Fd(ends[1]), std::move(signals)));
  write_end = ends[1];
  for (const int number : made->signals_) {
    struct sigaction action {
    }, old{};
    action.sa_handler = note;  // no SA_RESTART: a write that blocks gives way to a signal
    ::sigaction(number, nullptr, &old);
    if (old.sa_handler != SIG_IGN) ::sigaction(number, &action, nullptr);
  }
  return made;
}

SignalPipe::~SignalPipe() {
  for (const int number : signals_) {
    struct sigaction old {};
    ::sigaction(number, nullptr, &old);
    if (old.sa_handler == note) ::signal(number, SIG_DFL);
  }
  write_end = -1;
}

int SignalPipe::take() {
  unsigned char byte = 0;
  return ::read(read_.get(), &byte, 1) == 1 ? byte : 0;
}

}  // namespace muster
