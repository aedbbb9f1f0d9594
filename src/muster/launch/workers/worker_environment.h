#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"
#include "muster/launch/workers/numa.h"
#include "muster/launch/workers/worker.h"

namespace muster {

/// The ranks of a node's workers in the job.
struct Placement {
  int node_rank = 0;
  int nnodes = 1;
  int nproc = 1;       ///< workers on this node
  int first_rank = 0;  ///< the rank of this node's first worker
  int world_size = 1;
  int first_role_rank = 0;  ///< like first_rank, but counts only the nodes of this node's role
  int role_world_size = 1;
};

/// The inputs of the environment of a node's workers, besides the options.
struct JobEnvironment {
  Placement placement;
  std::string store_url;           ///< with muster's protocol: "unix:@..."
  uint16_t torch_port = 0;         ///< port with PyTorch's protocol, on the loopback interface
  Bytes secret;                    ///< the job's; empty: none
  std::string interface;           ///< where workers listen for other nodes; empty: each worker decides
  std::string node0_addr{};        ///< IP address of node 0 for the other nodes
  int generation = 0;              ///< how often all workers were started again, for any reason
  int restart_count = 0;           ///< how often after a failure
  int cpus = this_machine().cpus;  ///< shared by the node's workers
};

/// The environment of worker `local_rank`: `base` with torchrun's variables and muster's. Unlike torchrun, which gives
/// every worker one OpenMP thread, the node's CPUs are divided among its workers (unless OMP_NUM_THREADS is set).
/// TORCHELASTIC_ERROR_FILE is not set here.
Environment worker_environment(const RunOptions& options, const JobEnvironment& job, int local_rank, Environment base);
/// `base` with the variables that are the same for all workers of a node. A zygote needs them from its start.
Environment shared_environment(Environment base, int cpus, int nproc);

/// The workers of this node in the order of their local ranks, without TORCHELASTIC_ERROR_FILE. `cpus`: the CPUs of
/// each worker; empty: all CPUs.
std::vector<WorkerSpec> worker_specs(const RunOptions& options, const JobEnvironment& job,
                                     const std::vector<std::string>& command, const Environment& base,
                                     const std::vector<Cpus>& cpus);

/// The result of bind_workers() for this machine; empty without --numa-binding.
Result<std::vector<Cpus>> worker_cpus(const RunOptions& options);

}  // namespace muster
