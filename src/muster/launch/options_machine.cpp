// What a parse of the options depends on besides the command line: the environment and the machine.

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "muster/launch/options.h"
#include "muster/launch/options_values.h"

namespace muster {
namespace {

int count_gpus() {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("nvidia") && to_number<int>(std::string_view(name).substr(6))) ++count;
  }
  return count;
}

int count_xpus() {
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/class/drm", ignored)) {
    if (!entry.path().filename().string().starts_with("renderD")) continue;
    std::string vendor;
    std::ifstream(entry.path() / "device/vendor") >> vendor;
    if (vendor == "0x8086") ++count;
  }
  return count;
}

}  // namespace

Environment current_environment() {
  Environment environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string_view::npos) environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

Machine this_machine() {
  Machine machine;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) machine.cpus = std::max(1, CPU_COUNT(&set));
  machine.gpus = count_gpus();
  machine.xpus = count_xpus();
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    const std::string_view list = visible;
    const auto named = list.empty() ? 0 : 1 + std::count(list.begin(), list.end(), ',');
    machine.gpus = std::min(machine.gpus, static_cast<int>(named));
  }
  return machine;
}

}  // namespace muster
