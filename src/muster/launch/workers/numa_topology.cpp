// Reads a machine's CPUs and GPUs from Linux's /sys.

#include <algorithm>
#include <fstream>
#include <set>

#include "muster/launch/options/option_values.h"
#include "muster/launch/workers/numa.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

// Returns the first word of a file; empty if there is none.
std::string read_word(const fs::path& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}
int read_number(const fs::path& path, int otherwise) { return to_number<int>(read_word(path)).value_or(otherwise); }

// Reads a list such as "0-3,8" and keeps the CPUs that are in `allowed`.
Cpus read_cpus(const fs::path& path, const Cpus& allowed) {
  Cpus cpus;
  for (const std::string& range : split_list(read_word(path))) {
    const size_t dash = std::min(range.find('-'), range.size());
    const auto low = to_number<int>(std::string_view(range).substr(0, dash));
    const auto high = dash < range.size() ? to_number<int>(std::string_view(range).substr(dash + 1)) : low;
    for (const int cpu : allowed)
      if (low && high && cpu >= *low && cpu <= *high) cpus.push_back(cpu);
  }
  return cpus;
}

// Returns the directories in `parent` whose name is `prefix` and a number, by that number.
std::map<int, fs::path> numbered(const fs::path& parent, const std::string& prefix) {
  std::map<int, fs::path> found;
  std::error_code ignored;
  for (fs::directory_iterator it(parent, ignored), end; it != end; it.increment(ignored)) {
    const std::string name = it->path().filename();
    const auto number = name.starts_with(prefix) ? to_number<int>(name.substr(prefix.size())) : std::nullopt;
    if (number) found[*number] = it->path();
  }
  return found;
}

NumaTopology::Node describe_node(const fs::path& sys, const Cpus& cpus, const Cpus& allowed) {
  NumaTopology::Node node;
  const auto add = [](std::vector<Cpus>& groups, Cpus group) {
    if (!group.empty() && std::find(groups.begin(), groups.end(), group) == groups.end())
      groups.push_back(std::move(group));
  };
  for (const int cpu : cpus) {
    const fs::path directory = sys / "devices/system/cpu" / ("cpu" + std::to_string(cpu));
    node.package = read_number(directory / "topology/physical_package_id", 0);
    const Cpus threads = read_cpus(directory / "topology/thread_siblings_list", allowed);
    add(node.cores, threads.empty() ? Cpus{cpu} : threads);
    for (const auto& [index, cache] : numbered(directory / "cache", "index"))
      if (read_number(cache / "level", 0) == 3) add(node.complexes, read_cpus(cache / "shared_cpu_list", allowed));
  }
  return node;
}

// Returns the NUMA nodes of one vendor's GPUs in PCI order; -1 if the machine does not report a node.
std::vector<int> gpu_nodes(const fs::path& sys, const std::string& vendor) {
  std::set<fs::path> devices;
  std::error_code ignored;
  for (fs::directory_iterator it(sys / "bus/pci/devices", ignored), end; it != end; it.increment(ignored))
    if (read_word(it->path() / "class").starts_with("0x03") && read_word(it->path() / "vendor") == vendor)
      devices.insert(it->path());
  std::vector<int> nodes;
  for (const auto& device : devices) nodes.push_back(read_number(device / "numa_node", -1));
  return nodes;
}

}  // namespace

NumaTopology read_numa_topology(const fs::path& sys, const Cpus& allowed) {
  NumaTopology topology;
  std::map<int, int> index_of;  // index in topology.nodes, by the node's number
  for (const auto& [number, directory] : numbered(sys / "devices/system/node", "node")) {
    const Cpus cpus = read_cpus(directory / "cpulist", allowed);
    if (cpus.empty()) continue;  // memory without CPUs, or none that this process may use
    index_of[number] = static_cast<int>(topology.nodes.size());
    topology.nodes.push_back(describe_node(sys, cpus, allowed));
  }
  if (topology.nodes.empty()) topology.nodes.push_back(describe_node(sys, allowed, allowed));
  auto gpus = gpu_nodes(sys, "0x10de");
  // An AMD processor's integrated GPU does not count if there are NVIDIA GPUs.
  if (gpus.empty()) gpus = gpu_nodes(sys, "0x1002");
  for (const int number : gpus) topology.devices.push_back(index_of.contains(number) ? index_of[number] : -1);
  return topology;
}

}  // namespace muster
