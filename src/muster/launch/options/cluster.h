#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// The options for this node that follow from the environment of the cluster's software.
struct Cluster {
  std::string name;    ///< for the user: "Slurm job 17, step 0"
  int nnodes = 0;      ///< 0: not known
  int node_rank = -1;  ///< -1: not known
  std::string master_addr{};
  int master_port = 0;  ///< 0: not known
  std::string run_id{};

  /// The known fields as a user would write them: "--nnodes=4" and so on.
  std::vector<std::string> options() const;
};

/// Looks for, in this order: Open MPI and MPICH (mpirun), Slurm (srun), Kubernetes (PyTorchJob, JobSet, Indexed Job),
/// PMIx. A pure function of the environment. Returns none outside a cluster and inside a worker of another job.
/// kInvalidArgument if the cluster starts several agents on one node; the message says what to change.
Result<std::optional<Cluster>> find_cluster(const Environment& environment);

/// The hosts of a Slurm node list in order: "n[1-3,7],gpu[08-10]" is n1, n2, n3, n7, gpu08, gpu09, gpu10.
Result<std::vector<std::string>> expand_nodelist(const std::string& list);

}  // namespace muster
