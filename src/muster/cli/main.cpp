// The `muster` program: runs a command, or replaces itself by Python.

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "muster/cli/commands.h"
#include "muster/launch/command.h"
#include "muster/launch/failure.h"
#include "muster/launch/options/command_line.h"
#include "muster/launch/options/options.h"
#include "muster/mpi/pmix_server.h"

namespace muster {
namespace {

using Args = std::vector<std::string>;

int print_version(const std::string&, const Args&) { return std::printf("muster %s\n", MUSTER_VERSION) > 0 ? 0 : 1; }
int bench(const std::string& own_path, const Args& args) { return run_module("muster.bench", own_path, args); }

int complete(const std::string& own_path, const Args& args);

struct Command {
  const char* name;
  const char* args;
  const char* summary;
  int (*run)(const std::string& own_path, const Args& args);
};
constexpr Command kCommands[] = {
    {"run", "[options] script.py [arguments]", "start a job's workers on this node", run_command},
    {"warm", "[status|stop]", "keep torch imported between runs, so that they start at once", warm_command},
    {"status", "[--watch] [--json] [RUN_ID]", "show the jobs that run here: nodes, workers, restarts", status_command},
    {"dump", "[PID...]", "show what running ranks did last and what they wait for", dump_command},
    {"trace", "[-o FILE] [PID...]", "trace the last operations of running ranks, or draw their last step",
     trace_command},
    {"rpc", "top [options] [PID...]", "show remote calls live: in flight, rates and latencies", rpc_command},
    {"store", "COMMAND [arguments]", "serve a store, or read and write one: get, set, ls, watch, stat", store_command},
    {"explain", "COLLECTIVE|graph [options]", "show a collective's algorithm and time, or the plan of a compiled graph",
     explain_command},
    {"tune", "[--show]", "measure this machine once, for the choice of algorithms", tune_command},
    {"bench", "[arguments]", "compare muster with its peers", bench},
    {"completion", "bash|zsh|fish", "print a script that lets the shell complete commands and options", complete},
    {"--version", "", "print the version", print_version},
};

std::vector<CommandSyntax> all_commands() {
  std::vector<CommandSyntax> all;
  for (const auto& command : kCommands) {
    auto& syntax = all.emplace_back(CommandSyntax{command.name, command.summary, {}, {}});
    if (command.run == store_command) syntax.subcommands = store_subcommands();
    if (command.run == explain_command) syntax.subcommands = {{"graph", "", {}, {}}};
    if (command.run == rpc_command) syntax.subcommands = {{"top", "", {}, {}}};
    if (command.run == warm_command) syntax.subcommands = {{"status", "", {}, {}}, {"stop", "", {}, {}}};
    if (command.run == complete) syntax.subcommands = {{"bash", "", {}, {}}, {"zsh", "", {}, {}}, {"fish", "", {}, {}}};
  }
  return all;
}

int complete(const std::string& own_path, const Args& args) {
  const std::string shell = args.empty() ? "" : args.front();
  if (shell == "--help" || shell == "-h") {
    std::puts(
        "Prints a script that lets the shell complete commands and options.\n"
        "Usage: muster completion bash|zsh|fish\n\n"
        "  source <(muster completion bash)                 # or zsh\n"
        "  muster completion fish | source");
    return 0;
  }
  if (shell == "words")  // the completion scripts call this
    return std::fputs(completions({args.begin() + 1, args.end()}, all_commands()).c_str(), stdout) < 0;
  const auto script = completion_script(shell, program_path(own_path, current_environment()));
  if (!script) return print_error("", script.error().message, 2);
  return std::fputs(script->c_str(), stdout) < 0;
}

/// The end of the error message for an unknown command: the command that the user may have meant.
std::string suggestion(const std::string& name, const Args& args) {
  if (name.ends_with(".py") || name.starts_with("--nproc")) {
    std::string line = "; did you mean `muster run";
    for (const auto& arg : args) line += " " + arg;
    return line + "`";
  }
  Args names;
  for (const auto& command : kCommands) names.emplace_back(command.name);
  const std::string nearest = nearest_word(name, names);
  return nearest.empty() ? "" : "; did you mean " + nearest;
}

int unknown_command(const Args& args) {
  const std::string& name = args.front();
  return print_error("", "unknown command '" + name + "'" + suggestion(name, args) + " (`muster --help` lists them)",
                     2);
}

int help(const std::string& own_path, const Args& about) {
  if (!about.empty()) {
    for (const auto& command : kCommands) {
      if (about.front() != command.name) continue;
      const bool has_commands = command.run == store_command || command.run == rpc_command || command.run == bench;
      Args args(about.begin() + 1, has_commands ? about.end() : about.begin() + 1);
      args.emplace_back("--help");
      return command.run(own_path, args);
    }
    return unknown_command(about);
  }
  std::puts("muster: distributed training for PyTorch\n");
  for (const auto& command : kCommands) {
    const std::string line = std::string("muster ") + command.name + " " + command.args;
    std::printf("  %-44s %s\n", line.c_str(), command.summary);
  }
  std::printf("  %-44s %s\n", "muster help COMMAND", "its options");
  return 0;
}

int dispatch(const std::string& own_path, const Args& args) {
  const std::string name = args.empty() ? "--help" : args.front();
  const Args rest(args.begin() + (args.empty() ? 0 : 1), args.end());
  if (name == "--help" || name == "-h" || name == "help") return help(own_path, rest);
  for (const auto& command : kCommands)
    if (name == command.name) return command.run(own_path, rest);
  if (name == mpi::kPmixServerCommand) return pmix_server_command(own_path, rest);
  return unknown_command(args);
}

// Opens the standard descriptors that are closed, so that no descriptor that is opened later becomes 0, 1 or 2.
void open_standard_descriptors() {
  for (int fd = ::open("/dev/null", O_RDWR); fd >= 0 && fd <= 2;) fd = ::open("/dev/null", O_RDWR);
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  muster::open_standard_descriptors();
  return muster::dispatch(argc > 0 ? argv[0] : "muster", {argv + std::min(argc, 1), argv + argc});
}
