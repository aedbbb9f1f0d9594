// Collects the inputs of the option parser besides the command line: the environment and the machine.

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "muster/launch/cgroup.h"
#include "muster/launch/options/option_values.h"
#include "muster/launch/options/options.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

int count_entries(const fs::path& directory, bool (*counts)(const fs::path&)) {
  int count = 0;
  std::error_code ignored;
  for (fs::directory_iterator it(directory, ignored), end; it != end; it.increment(ignored))
    count += counts(it->path()) ? 1 : 0;
  return count;
}

// True for a device, and false for the driver's own files, such as nvidiactl and davinci_manager.
bool is_numbered(const fs::path& path, std::string_view prefix) {
  const std::string name = path.filename();
  return name.starts_with(prefix) && to_number<int>(std::string_view(name).substr(prefix.size()));
}

bool is_nvidia_device(const fs::path& path) { return is_numbered(path, "nvidia"); }
bool is_npu(const fs::path& path) { return is_numbered(path, "davinci"); }

// The kernel's driver also lists CPUs, with gpu_id 0.
bool is_amd_gpu(const fs::path& node) {
  uint64_t id = 0;
  return std::ifstream(node / "gpu_id") >> id && id != 0;
}

std::vector<int> chosen(const std::vector<int>& devices, const std::string& list) {
  std::vector<int> found;
  for (std::string word : split_list(list)) {
    std::erase(word, ' ');
    const auto number = to_number<int>(word);
    if (number && *number >= 0 && static_cast<size_t>(*number) < devices.size()) {
      found.push_back(devices[static_cast<size_t>(*number)]);
    } else if (word.starts_with("GPU-") || word.starts_with("MIG-")) {
      found.push_back(-1);
    } else {
      break;
    }
  }
  return found;
}

bool is_intel_gpu(const fs::path& device) {
  std::string vendor;
  std::ifstream(device / "device/vendor") >> vendor;
  return device.filename().string().starts_with("renderD") && vendor == "0x8086";
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

std::string value_of(const Environment& environment, const std::string& name) {
  const auto found = environment.find(name);
  return found == environment.end() ? "" : found->second;
}

std::vector<int> allowed_cpus() {
  constexpr size_t kMaxSets = 1024;  // of 1,024 CPUs each; the kernel refuses a set that is smaller than its own
  for (std::vector<cpu_set_t> sets(1); sets.size() <= kMaxSets; sets.resize(2 * sets.size())) {
    const size_t bytes = sets.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, sets.data()) != 0) continue;
    std::vector<int> cpus;
    for (size_t cpu = 0; cpu < 8 * bytes; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, sets.data())) cpus.push_back(static_cast<int>(cpu));
    return cpus;
  }
  return {};
}

int usable_cpus(int allowed, const std::string& root) {
  return std::max(1, std::min(allowed, cgroup_cpus(root).value_or(allowed)));
}

Machine this_machine() {
  Machine machine;
  machine.cpus = usable_cpus(static_cast<int>(allowed_cpus().size()));
  const int gpus = count_gpus();
  const size_t visible = visible_devices(std::vector<int>(static_cast<size_t>(gpus)), current_environment()).size();
  machine.gpus = std::min(gpus, static_cast<int>(visible));  // a process sees only one part of a partitioned GPU
  machine.xpus = count_entries("/sys/class/drm", is_intel_gpu);
  machine.npus = count_npus(current_environment());
  return machine;
}

int count_gpus(const std::string& root) {
  const int nvidia = count_entries(root + "/dev", is_nvidia_device);
  if (nvidia > 0 || !fs::exists(root + "/dev/kfd")) return nvidia;
  return count_entries(root + "/sys/class/kfd/kfd/topology/nodes", is_amd_gpu);
}

int count_npus(const Environment& environment, const std::string& root) {
  const int npus = count_entries(root + "/dev", is_npu);
  const auto listed = environment.find("ASCEND_RT_VISIBLE_DEVICES");
  return listed == environment.end() ? npus : std::min(npus, static_cast<int>(split_list(listed->second).size()));
}

std::vector<int> visible_devices(std::vector<int> devices, const Environment& environment) {
  // Each runtime layer sees only the devices that the layer below it shows.
  for (const char* name : {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}) {
    const auto list = environment.find(name);
    if (list != environment.end() && !devices.empty()) devices = chosen(devices, list->second);
  }
  return devices;
}

}  // namespace muster
