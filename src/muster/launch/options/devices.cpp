#include "muster/launch/options/devices.h"

#include <algorithm>
#include <fstream>
#include <string_view>

#include "muster/launch/options/option_values.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

template <class Counts>
int count_entries(const fs::path& folder, Counts counts) {
  int count = 0;
  std::error_code ignored;
  for (fs::directory_iterator it(folder, ignored), end; it != end; it.increment(ignored)) count += counts(it->path());
  return count;
}

bool is_nvidia_device(const fs::path& path) {
  const std::string name = path.filename();
  return name.starts_with("nvidia") && to_number<int>(std::string_view(name).substr(6));
}

// The kernel's driver lists CPUs too, whose number is 0.
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

}  // namespace

int count_gpus(const fs::path& root) {
  const int nvidia = count_entries(root / "dev", is_nvidia_device);
  if (nvidia > 0 || !fs::exists(root / "dev/kfd")) return nvidia;
  return count_entries(root / "sys/class/kfd/kfd/topology/nodes", is_amd_gpu);
}

std::vector<int> visible_devices(std::vector<int> devices, const Environment& environment) {
  // The runtime below sees what is left by the first, and so on.
  for (const char* name : {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}) {
    const auto list = environment.find(name);
    if (list != environment.end() && !devices.empty()) devices = chosen(devices, list->second);
  }
  return devices;
}

}  // namespace muster
