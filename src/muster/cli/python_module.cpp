#include "muster/cli/python_module.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "muster/launch/command.h"

namespace muster {
namespace {

// Runs the module named by the first word; a Python without muster says so in one sentence.
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

int cannot(const std::string& message, int status) {
  std::fprintf(stderr, "muster: %s\n", message.c_str());
  return status;
}

}  // namespace

int run_module(const char* module, const std::string& own_path, const std::vector<std::string>& arguments) {
  auto python = find_python(own_path, current_environment());
  if (!python) return cannot(python.error().message, 127);
  std::vector<std::string> words = {*python, "-c", kRunModule, module};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // Where to look for what is installed beside this program.
  std::error_code ignored;
  ::setenv("MUSTER_BIN", std::filesystem::read_symlink("/proc/self/exe", ignored).c_str(), /*replace=*/0);
  ::execv(argv[0], argv.data());
  return cannot("cannot start '" + *python + "': " + std::strerror(errno), 126);
}

}  // namespace muster
