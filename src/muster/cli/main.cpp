// The `muster` program: finds out which command is meant, and runs it or hands over to Python.

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "muster/cli/completion.h"
#include "muster/cli/dump_command.h"
#include "muster/cli/explain_command.h"
#include "muster/cli/python_module.h"
#include "muster/cli/run.h"
#include "muster/cli/status_command.h"
#include "muster/cli/store_command.h"
#include "muster/cli/tune_command.h"
#include "muster/cli/warm_command.h"
#include "muster/launch/command.h"
#include "muster/launch/options/command_line.h"
#include "muster/launch/options/options.h"

namespace muster {
namespace {

using Words = std::vector<std::string>;

int print_error(const std::string& message, int status) {
  std::fprintf(stderr, "muster: %s\n", message.c_str());
  return status;
}

int print_version(const std::string&, const Words&) { return std::printf("muster %s\n", MUSTER_VERSION) > 0 ? 0 : 1; }
int bench(const std::string& own_path, const Words& words) { return run_module("muster.bench", own_path, words); }

int complete(const std::string& own_path, const Words& words);

struct Command {
  const char* name;
  const char* words;
  const char* summary;
  int (*run)(const std::string& own_path, const Words& words);
};
constexpr Command kCommands[] = {
    {"run", "[options] script.py [arguments]", "start a job's workers on this node", run_command},
    {"warm", "[status|stop]", "keep torch imported between runs, so that they start at once", warm_command},
    {"status", "[--watch] [--json] [RUN_ID]", "show the jobs that run here: nodes, workers, restarts", status_command},
    {"dump", "[PID...]", "show what running ranks did last and what they wait for", dump_command},
    {"trace", "[-o FILE] [PID...]", "trace the last operations of running ranks, or draw their last step",
     trace_command},
    {"store", "COMMAND [arguments]", "serve a store, or look into one: get, set, ls, watch, stat", store_command},
    {"explain", "COLLECTIVE [options]", "show which algorithm a collective takes, how long, and its steps",
     explain_command},
    {"tune", "[--show]", "measure this machine once, for the choice of algorithms", tune_command},
    {"bench", "[arguments]", "measure muster beside its peers", bench},
    {"completion", "bash|zsh|fish", "print a script that lets the shell complete commands and options", complete},
    {"--version", "", "say which version this is", print_version},
};

int complete(const std::string&, const Words& words) {
  std::vector<CommandWords> all;
  for (const auto& command : kCommands) {
    all.push_back({command.name, {}, {}});
    auto& subcommands = all.back().subcommands;
    if (command.run == store_command) subcommands = store_subcommands();
    if (command.run == warm_command) subcommands = {{"status", {}, {}}, {"stop", {}, {}}};
    if (command.run == complete) subcommands = {{"bash", {}, {}}, {"zsh", {}, {}}, {"fish", {}, {}}};
  }
  if (!words.empty() && (words.front() == "--help" || words.front() == "-h")) {
    std::puts(
        "Prints a script that lets the shell complete commands and options.\n"
        "Usage: muster completion bash|zsh|fish\n\n"
        "  source <(muster completion bash)                 # or zsh\n"
        "  muster completion fish | source");
    return 0;
  }
  const auto script = completion_script(words.empty() ? "" : words.front(), all);
  if (!script) return print_error(script.error().message, 2);
  return std::fputs(script->c_str(), stdout) < 0;
}

/// What the user who gave a command that there is not may have wanted to type.
std::string meant_by(const std::string& name, const Words& words) {
  if (name.ends_with(".py") || name.starts_with("--nproc")) {
    std::string line = "; did you mean `muster run";
    for (const auto& word : words) line += " " + word;
    return line + "`";
  }
  Words names;
  for (const auto& command : kCommands) names.emplace_back(command.name);
  const std::string nearest = nearest_word(name, names);
  return nearest.empty() ? "" : "; did you mean " + nearest;
}

int no_command(const Words& words) {
  const std::string& name = words.front();
  return print_error("there is no command '" + name + "'" + meant_by(name, words) + " (`muster --help` lists them)", 2);
}

int help(const std::string& own_path, const Words& about) {
  if (!about.empty()) {
    for (const auto& command : kCommands) {
      if (about.front() != command.name) continue;
      const bool has_commands = command.run == store_command || command.run == bench;
      Words words(about.begin() + 1, has_commands ? about.end() : about.begin() + 1);
      words.emplace_back("--help");
      return command.run(own_path, words);
    }
    return no_command(about);
  }
  std::puts("muster: distributed training for PyTorch\n");
  for (const auto& command : kCommands) {
    const std::string line = std::string("muster ") + command.name + " " + command.words;
    std::printf("  %-44s %s\n", line.c_str(), command.summary);
  }
  std::printf("  %-44s %s\n", "muster help COMMAND", "its options");
  return 0;
}

int dispatch(const std::string& own_path, const Words& words) {
  const std::string name = words.empty() ? "--help" : words.front();
  const Words rest(words.begin() + (words.empty() ? 0 : 1), words.end());
  if (name == "--help" || name == "-h" || name == "help") return help(own_path, rest);
  for (const auto& command : kCommands)
    if (name == command.name) return command.run(own_path, rest);
  return no_command(words);
}

// A descriptor opened later must never land on 0, 1 or 2.
void open_standard_descriptors() {
  for (int fd = ::open("/dev/null", O_RDWR); fd >= 0 && fd <= 2;) fd = ::open("/dev/null", O_RDWR);
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  muster::open_standard_descriptors();
  return muster::dispatch(argc > 0 ? argv[0] : "muster", {argv + std::min(argc, 1), argv + argc});
}
