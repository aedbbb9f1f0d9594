#include "muster/cli/commands.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "muster/launch/command.h"
#include "muster/launch/failure.h"

namespace muster {
namespace {

// Runs the module that the first argument names. Prints one sentence if this Python has no muster package.
constexpr const char* kRunModule = R"(
import importlib, runpy, sys
module = sys.argv.pop(1)
try:
    importlib.import_module(module.rpartition('.')[0])  # not the module itself: runpy warns if it is there already
except ImportError as error:
    absent = (error.name or '').partition('.')[0] == 'muster'
    advice = 'install the torch-muster wheel there, or name a Python that has it with MUSTER_PYTHON'
    sys.exit(f'muster: {sys.executable} has no muster: {advice}' if absent else f'muster: {error}')
runpy.run_module(module, run_name='__main__', alter_sys=True)
)";

}  // namespace

int run_module(const char* module, const std::string& own_path, const std::vector<std::string>& args) {
  auto python = find_python(own_path, current_environment());
  if (!python) return print_error("", python.error().message, 127);
  std::vector<std::string> words = {*python, "-c", kRunModule, module};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // With MUSTER_BIN, the package finds the programs that are installed next to this one.
  std::error_code ignored;
  ::setenv("MUSTER_BIN", std::filesystem::read_symlink("/proc/self/exe", ignored).c_str(), /*replace=*/0);
  ::execv(argv[0], argv.data());
  return print_error("", "cannot start '" + *python + "': " + std::strerror(errno), 126);
}

}  // namespace muster
