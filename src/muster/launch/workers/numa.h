#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// The kernel's CPU numbers, in ascending order.
using Cpus = std::vector<int>;

/// What matters of a machine for the binding of workers. It has only the CPUs that this process may run on.
struct NumaTopology {
  struct Node {
    int package = 0;
    std::vector<Cpus> cores;      ///< each with its hardware threads
    std::vector<Cpus> complexes;  ///< cores that share a last-level cache
  };
  std::vector<Node> nodes;   ///< those with CPUs
  std::vector<int> devices;  ///< for each GPU in PCI order: the index of its node; -1: not known
};

/// `sys`: where the kernel shows its devices. `allowed`: the CPUs that this process may run on. A machine that shows no
/// NUMA nodes is one node.
NumaTopology read_numa_topology(const std::filesystem::path& sys = "/sys", const Cpus& allowed = allowed_cpus());

/// The CPUs of each worker of this node, by torchrun's modes: `node` is all CPUs of the device's NUMA node, `socket`
/// all of its socket, `exclusive` a share of the node's cores that no other worker has, `core-complex` one group of
/// cores with a common cache. A worker's device is the one of its local rank. Workers without a device, or whose
/// device's node is not known, are spread evenly over the nodes. kInvalidArgument if there are too few cores for
/// `exclusive`.
Result<std::vector<Cpus>> bind_workers(NumaBinding binding, int nproc, const NumaTopology& topology);

/// "0-3,8", as taskset takes it.
std::string cpu_list(const Cpus& cpus);

}  // namespace muster
