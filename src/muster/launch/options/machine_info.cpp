// What a parse of the options depends on besides the command line: the environment and the machine.

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "muster/launch/options/devices.h"
#include "muster/launch/options/options.h"

namespace muster {
namespace {

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

std::vector<int> allowed_cpus() {
  constexpr size_t kMostSets = 1024;  // of 1,024 CPUs; the kernel refuses what is too small for its own set
  for (std::vector<cpu_set_t> sets(1); sets.size() <= kMostSets; sets.resize(2 * sets.size())) {
    const size_t bytes = sets.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, sets.data()) != 0) continue;
    std::vector<int> cpus;
    for (size_t cpu = 0; cpu < 8 * bytes; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, sets.data())) cpus.push_back(static_cast<int>(cpu));
    return cpus;
  }
  return {};
}

Machine this_machine() {
  Machine machine;
  machine.cpus = std::max(1, static_cast<int>(allowed_cpus().size()));
  const int gpus = count_gpus();
  const size_t visible = visible_devices(std::vector<int>(static_cast<size_t>(gpus)), current_environment()).size();
  machine.gpus = std::min(gpus, static_cast<int>(visible));  // of one's parts a process sees one
  machine.xpus = count_xpus();
  return machine;
}

}  // namespace muster
