#include "muster/cli/warm_attach.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>

#include "muster/launch/command.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/option_values.h"
#include "muster/launch/workers/warm.h"
#include "muster/launch/workers/zygote_program.h"

namespace muster {
namespace {

// As IGNORED_SIGNALS in python/muster/_zygote/forks.py.
constexpr std::array kPassedOn = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};

// The Python as `muster warm` calls it. One environment has its Python under several names: python, python3.
std::string name_of_warm(const std::string& own_path, const Environment& environment, const std::string& python) {
  namespace fs = std::filesystem;
  const auto found = find_python(own_path, environment);
  std::error_code ignored;
  const bool same = found && fs::path(*found).parent_path() == fs::path(python).parent_path() &&
                    fs::equivalent(*found, python, ignored);
  return same ? *found : python;
}

// Opens a descriptor that is readable when one of the signals has come. A signal that is ignored stays ignored.
Fd take_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int number : kPassedOn) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) ::sigaddset(&signals, number);
  }
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  return Fd(::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
}

void pass_on(const Fd& signals, const Fd& channel) {
  signalfd_siginfo signal{};
  while (::read(signals.get(), &signal, sizeof signal) == sizeof signal)
    (void)send_message(channel.get(), fmt::format("signal {}", signal.ssi_signo));
}

}  // namespace

int attach_to_warm(const std::string& own_path, const std::vector<std::string>& args) {
  if (args.size() < 4) return print_error("warm", "attach is a part of muster.forkserver, and not a command", 2);
  const Fd program(to_number<int>(args[0]).value_or(-1));
  const Fd channel(to_number<int>(args[1]).value_or(-1));
  Fd server_end(to_number<int>(args[2]).value_or(-1));
  const Fd signals = take_signals();
  const Environment environment = current_environment();
  const WarmKey key{name_of_warm(own_path, environment, args[3]), {args.begin() + 4, args.end()}, environment};
  const auto path = warm_path(key);
  const auto zygote = path ? connect_warm(*path) : tl::unexpected(path.error());
  if (!zygote || !send_message(zygote->get(), "fork", {server_end.get(), STDERR_FILENO})) return 1;
  server_end.reset();
  while (true) {
    std::array<pollfd, 3> events = {{{program.get(), 0, 0}, {channel.get(), 0, 0}, {signals.get(), POLLIN, 0}}};
    if (::poll(events.data(), events.size(), -1) < 0 && errno != EINTR) return 1;
    if (events[0].revents != 0 || events[1].revents != 0) return 0;
    pass_on(signals, channel);
  }
}

}  // namespace muster
