// The `muster` program: finds out which command is meant, and runs it or hands over to Python.

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "muster/launch/agent.h"
#include "muster/launch/command.h"
#include "muster/launch/guard.h"
#include "muster/launch/options.h"

namespace muster {
namespace {

using Words = std::vector<std::string>;

constexpr const char* kHelp =
    "muster: distributed training for PyTorch\n"
    "\n"
    "  muster run [options] script.py [arguments]   start a job's workers on this node\n"
    "  muster bench [arguments]                     measure muster beside its peers\n"
    "  muster help run                              the options of `muster run`\n"
    "  muster --version\n";

// Commands that are Python modules of the package.
struct PythonCommand {
  const char* name;
  const char* module;
};
constexpr PythonCommand kPythonCommands[] = {{"bench", "muster.bench"}};

// Runs the module named by the first word, as `python -m` would; a Python without muster says so in one sentence.
constexpr const char* kRunModule = R"(
import importlib, runpy, sys
module = sys.argv.pop(1)
try:
    importlib.import_module(module)
except ImportError as error:
    absent = (error.name or '').partition('.')[0] == 'muster'
    advice = 'install the torch-muster wheel there, or name a Python that has it with MUSTER_PYTHON'
    sys.exit(f'muster: {sys.executable} has no muster: {advice}' if absent else f'muster: {error}')
runpy.run_module(module, run_name='__main__', alter_sys=True)
)";

int complain(const std::string& message, int status) {
  std::fprintf(stderr, "muster: %s\n", message.c_str());
  return status;
}

int hand_over(const char* module, const std::string& own_path, const Words& rest) {
  auto python = find_python(own_path, current_environment());
  if (!python) return complain(python.error().message, 127);
  Words words = {*python, "-c", kRunModule, module};
  words.insert(words.end(), rest.begin(), rest.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execv(argv[0], argv.data());
  return complain("cannot start '" + *python + "': " + std::strerror(errno), 126);
}

// A folder for the workers' error files. Whoever is left of agent and guard removes it.
class ScratchFolder {
 public:
  ScratchFolder() {
    std::error_code ignored;
    std::string pattern = (std::filesystem::temp_directory_path(ignored) / "muster-XXXXXX").string();
    if (::mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~ScratchFolder() { remove(); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  void remove() const {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

int run(const std::string& own_path, const Words& rest) {
  const auto options = parse_run_options(rest, current_environment(), this_machine());
  if (!options) return complain("run: " + options.error().message + " (`muster help run` lists the options)", 2);
  if (options->help) {
    std::fputs(run_help().c_str(), stdout);
    return 0;
  }
  const ScratchFolder scratch;
  if (scratch.path().empty())
    return complain("run: cannot make a temporary folder: " + std::string(std::strerror(errno)), 1);
  return run_guarded([&] {
    const int status = run_agent(*options, own_path, scratch.path());
    if (guard_is_gone()) scratch.remove();
    return status;
  });
}

int dispatch(const std::string& own_path, const Words& words) {
  const std::string command = words.empty() ? "--help" : words.front();
  const Words rest(words.begin() + (words.empty() ? 0 : 1), words.end());
  if (command == "run") return run(own_path, rest);
  if (command == "--version") return std::printf("muster %s\n", MUSTER_VERSION) > 0 ? 0 : 1;
  if (command == "--help" || command == "-h" || command == "help") {
    const bool of_run = command == "help" && !rest.empty() && rest.front() == "run";
    std::fputs(of_run ? run_help().c_str() : kHelp, stdout);
    return 0;
  }
  for (const auto& python : kPythonCommands)
    if (command == python.name) return hand_over(python.module, own_path, rest);
  return complain("there is no command '" + command + "' (`muster --help` lists them)", 2);
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
