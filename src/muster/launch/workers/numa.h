#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// CPU numbers as the kernel counts them, in order.
using Cpus = std::vector<int>;

/// What of a machine matters for binding workers: only CPUs that this process may run on.
struct NumaTopology {
  struct Node {
    int package = 0;
    std::vector<Cpus> cores;      ///< each with its hardware threads
    std::vector<Cpus> complexes;  ///< cores that share a last-level cache
  };
  std::vector<Node> nodes;   ///< those with CPUs
  std::vector<int> devices;  ///< of each GPU, in PCI order: the index of the node that it is near to; -1: of none
};

/// Through hwloc, which is loaded now. kUnsupported when it is not there, or was not when this was built.
Result<NumaTopology> read_numa_topology();

/// The CPUs of each of this node's workers, as torchrun's modes: `node` all of the device's NUMA node, `socket` all of
/// its socket, `exclusive` a share of the node's cores that no other worker has, `core-complex` one group of cores with
/// a common cache. A worker's device is the one of its local rank; workers without one, or whose device is near to
/// none, are spread evenly over the nodes. kInvalidArgument when there are too few cores for `exclusive`.
Result<std::vector<Cpus>> bind_workers(NumaBinding binding, int nproc, const NumaTopology& topology);

/// "0-3,8", as taskset takes it.
std::string cpu_list(const Cpus& cpus);

}  // namespace muster
