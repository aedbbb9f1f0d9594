#include "muster/launch/workers/numa.h"

#include <fmt/format.h>

#include <algorithm>

namespace muster {
namespace {

Cpus join(const std::vector<Cpus>& groups) {
  Cpus all;
  for (const auto& group : groups) all.insert(all.end(), group.begin(), group.end());
  std::sort(all.begin(), all.end());
  return all;
}

// Returns the index of the NUMA node of each worker.
std::vector<size_t> nodes_of_workers(int nproc, const NumaTopology& topology) {
  std::vector<size_t> nodes_of_workers;
  const size_t nodes = topology.nodes.size(), workers = static_cast<size_t>(nproc);
  for (size_t local = 0; local < workers; ++local) {
    const bool has_device = local < topology.devices.size() && topology.devices[local] >= 0;
    nodes_of_workers.push_back(has_device ? static_cast<size_t>(topology.devices[local]) : local * nodes / workers);
  }
  return nodes_of_workers;
}

Cpus whole_socket(size_t node_of, const NumaTopology& topology) {
  std::vector<Cpus> cores;
  for (const auto& node : topology.nodes)
    if (node.package == topology.nodes[node_of].package)
      cores.insert(cores.end(), node.cores.begin(), node.cores.end());
  return join(cores);
}

// Returns the CPUs of one worker if `sharers` workers divide the node's cores.
Cpus share(const NumaTopology::Node& node, size_t position, size_t sharers) {
  const auto begin = node.cores.begin();
  const auto at = [&](size_t i) { return begin + static_cast<std::ptrdiff_t>(i * node.cores.size() / sharers); };
  return join({at(position), at(position + 1)});
}

}  // namespace

Result<std::vector<Cpus>> bind_workers(NumaBinding binding, int nproc, const NumaTopology& topology) {
  std::vector<Cpus> bound(static_cast<size_t>(nproc));
  if (binding == NumaBinding::kNone || topology.nodes.empty()) return bound;
  const auto node_of = nodes_of_workers(nproc, topology);
  std::vector<size_t> arrived(topology.nodes.size());
  for (size_t local = 0; local < bound.size(); ++local) {
    const auto& node = topology.nodes[node_of[local]];
    const size_t position = arrived[node_of[local]]++;
    const auto sharers = static_cast<size_t>(std::count(node_of.begin(), node_of.end(), node_of[local]));
    if (binding == NumaBinding::kNode) {
      bound[local] = join(node.cores);
    } else if (binding == NumaBinding::kSocket) {
      bound[local] = whole_socket(node_of[local], topology);
    } else if (binding == NumaBinding::kCoreComplex) {
      bound[local] = node.complexes.empty() ? join(node.cores) : node.complexes[position % node.complexes.size()];
    } else if (sharers > node.cores.size()) {
      return fail(ErrorCode::kInvalidArgument,
                  fmt::format("--numa-binding exclusive: {} workers would share the {} cores of one NUMA node; start "
                              "fewer, or bind them to node",
                              sharers, node.cores.size()));
    } else {
      bound[local] = share(node, position, sharers);
    }
  }
  return bound;
}

std::string cpu_list(const Cpus& cpus) {
  std::string text;
  for (size_t i = 0; i < cpus.size();) {
    size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (end > i + 1) text += fmt::format("-{}", cpus[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace muster
