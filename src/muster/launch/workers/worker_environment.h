#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// Where a node's workers stand in the job.
struct Placement {
  int node_rank = 0;
  int nnodes = 1;
  int nproc = 1;       ///< workers on this node
  int first_rank = 0;  ///< the rank of this node's first worker
  int world_size = 1;
  int first_role_rank = 0;  ///< as first_rank, counting only the nodes of this node's role
  int role_world_size = 1;
};

/// What the workers of one node have in common.
struct JobEnvironment {
  Placement placement;
  std::string run_id;
  std::string role;
  std::string store_url;    ///< muster's dialect: "unix:@..."
  uint16_t torch_port = 0;  ///< PyTorch's dialect, on this node's loopback
  Bytes secret;             ///< the job's; empty: the workers are on their own
  std::string interface;    ///< where workers listen for other nodes; empty: their choice
  int cpus = 1;             ///< shared by the node's workers
  int generation = 0;       ///< one more whenever all workers are started anew, whatever for
  int restart_count = 0;    ///< after failures alone
  int max_restarts = 0;
  bool virtual_local_rank = false;  ///< every worker believes to be the first, and sees one device
};

/// The environment of worker `local_rank`: `base` with torchrun's variables and muster's. Unlike torchrun, which gives
/// every worker one OpenMP thread, the node's CPUs are divided among its workers (unless OMP_NUM_THREADS is set).
/// TORCHELASTIC_ERROR_FILE is not set here.
Environment worker_environment(const JobEnvironment& job, int local_rank, Environment base);
/// `base` with what all workers of a node are given alike, and what a Python that forks them must have from its start.
Environment shared_environment(Environment base, int cpus, int nproc);

}  // namespace muster
