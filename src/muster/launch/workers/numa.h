#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// The kernel's CPU numbers, in ascending order.
using Cpus = std::vector<int>;

/// The parts of a machine that matter for the binding of workers. Only CPUs that this process may run on are included.
struct NumaTopology {
  struct Node {
    int package = 0;
    std::vector<Cpus> cores;      ///< each core has its hardware threads
    std::vector<Cpus> complexes;  ///< each has the CPUs of cores that share a last-level cache
  };
  std::vector<Node> nodes;   ///< nodes that have CPUs
  std::vector<int> devices;  ///< for each GPU in PCI order: the index of its node; -1: not known
};

/// `sys`: the directory where the kernel shows its devices. `allowed`: the CPUs that this process may run on. If the
/// machine shows no NUMA nodes, the result has one node.
NumaTopology read_numa_topology(const std::filesystem::path& sys = "/sys", const Cpus& allowed = allowed_cpus());

/// Returns the CPUs of each worker of this node. The modes are torchrun's:
///
///   node           all CPUs of the NUMA node of the worker's device
///   socket         all CPUs of that node's socket
///   exclusive      a share of the node's cores that no other worker has
///   core-complex   one group of cores with a common cache
///
/// The index of a worker's device is its local rank. Workers without a device, or with a device whose node is not
/// known, are spread evenly over the nodes. kInvalidArgument if there are too few cores for `exclusive`.
Result<std::vector<Cpus>> bind_workers(NumaBinding binding, int nproc, const NumaTopology& topology);

/// "0-3,8", the format that taskset takes.
std::string cpu_list(const Cpus& cpus);

}  // namespace muster
