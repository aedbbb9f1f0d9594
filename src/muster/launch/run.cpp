#include "muster/launch/run.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "muster/launch/agent.h"
#include "muster/launch/guard.h"
#include "muster/launch/options.h"

namespace muster {
namespace {

int complain(const std::string& message, int status) {
  std::fprintf(stderr, "muster: run: %s\n", message.c_str());
  return status;
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

int run_here(const RunOptions& options, const std::string& own_path) {
  if (!options.cluster.empty() && options.node_rank.value_or(0) == 0)
    std::fprintf(stderr, "muster: taken from %s\n", options.cluster.c_str());
  const ScratchFolder scratch;
  if (scratch.path().empty())
    return complain("cannot make a temporary folder: " + std::string(std::strerror(errno)), 1);
  const auto agent = [&] {
    const int status = run_agent(options, own_path, scratch.path());
    if (guard_is_gone()) scratch.remove();
    return status;
  };
  return run_guarded(agent, options.signals);
}

}  // namespace

int run_command(const std::string& own_path, const std::vector<std::string>& words) {
  const auto options = parse_run_options(words, current_environment(), this_machine());
  if (!options) return complain(options.error().message + " (`muster help run` lists the options)", 2);
  if (!options->help) return run_here(*options, own_path);
  std::fputs(run_help().c_str(), stdout);
  return 0;
}

}  // namespace muster
