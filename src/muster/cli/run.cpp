#include "muster/cli/commands.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "muster/launch/agent/agent.h"
#include "muster/launch/agent/agent_monitor.h"
#include "muster/launch/agent/hosts.h"
#include "muster/launch/agent/status_file.h"
#include "muster/launch/command.h"
#include "muster/launch/dry_run.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/options.h"
#include "muster/launch/private_directories.h"
#include "muster/launch/signals.h"

namespace muster {
namespace {

// `muster run --hosts` on another host holds the other end of standard input, over ssh. It sends signals as bytes. When
// this input ends, the job ends. Workers do not get this input.
void end_with_stdin() {
  const int input = ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3);
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null >= 0) ::dup2(null, STDIN_FILENO);
  // tidy: allow(detach) it waits for input until the process ends
  std::thread([input] {
    uint8_t byte = 0;
    ssize_t got = 0;
    while ((got = ::read(input, &byte, 1)) > 0 || (got < 0 && errno == EINTR))
      if (const int number = got > 0 ? signal_of_byte(byte) : 0; number != 0) ::kill(::getpid(), number);
    ::kill(::getpid(), SIGTERM);
  }).detach();
}

int run_here(RunOptions options, const std::string& own_path) {
  if (!options.cluster.empty() && options.node_rank.value_or(0) == 0)
    std::fprintf(stderr, "muster: taken from %s\n", options.cluster.c_str());
  const ScratchDirectory scratch;
  if (scratch.path().empty()) {
    const std::string reason = std::strerror(errno);
    return print_error("run",
                       "cannot create a directory in " + temporary_directory() + ": " + reason +
                           "; set TMPDIR to a directory that can be written",
                       1);
  }
  if (options.from_stdin) {
    auto saved = save_stdin(scratch.path());
    if (!saved) return print_error("run", saved.error().message, 1);
    options.program = std::move(*saved);
  }
  DeathNotice death_notice;
  const auto agent = [&] {
    if (options.until_stdin_ends) end_with_stdin();
    const int status = run_agent(options, own_path, scratch.path(), death_notice);
    if (monitor_is_gone()) scratch.remove();
    return status;
  };
  return run_monitored(agent, handled_signals(options.signals), [&] {
    remove_dead_status_files(current_environment());
    death_notice.send(options.secret);
  });
}

int show_dry_run(const RunOptions& options, const std::string& own_path) {
  const auto text = describe_run(options, own_path, current_environment());
  if (!text) return print_error("run", text.error().message, exit_status(text.error()));
  return std::fputs(text->c_str(), stdout) < 0;
}

}  // namespace

int run_command(const std::string& own_path, const std::vector<std::string>& args) {
  const auto options = parse_run_options(args, current_environment(), this_machine());
  if (!options) return print_error("run", options.error().message + " (`muster help run` lists the options)", 2);
  if (options->help) return std::fputs(run_help().c_str(), stdout) < 0;
  for (const auto& notice : options->notices) std::fprintf(stderr, "muster: %s\n", notice.c_str());
  if (options->dry_run) return show_dry_run(*options, own_path);
  if (!options->hosts.empty()) return run_hosts(*options, program_path(own_path, current_environment()));
  return run_here(*options, own_path);
}

}  // namespace muster
