#include "muster/launch/options/cluster.h"

#include <fmt/format.h>

#include "muster/launch/options/option_values.h"

namespace muster {
namespace {

using Found = Result<std::optional<Cluster>>;

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}
  bool has(const char* name) const { return !text(name).empty(); }
  std::string text(const char* name) const { return value_of(environment_, name); }
  int number(const char* name, int otherwise) const {
    const auto value = to_number<int>(text(name));
    return value && *value >= 0 ? *value : otherwise;
  }

 private:
  const Environment& environment_;
};

tl::unexpected<Error> several_agents(const char* who, int tasks, int nodes, const char* remedy) {
  return bad_option(
      fmt::format("{} starts {} processes on {}, but `muster run` starts a node's workers itself "
                  "(--nproc-per-node): start one process on each node ({}), or give --standalone",
                  who, tasks, nodes == 1 ? "one node" : fmt::format("{} nodes", nodes), remedy));
}

// The root is at MASTER_ADDR (mpirun -x MASTER_ADDR=...), or on the first host of a Slurm job.
Result<> find_master(const Variables& v, Cluster& cluster) {
  cluster.master_addr = v.text("MASTER_ADDR");
  cluster.master_port = v.number("MASTER_PORT", 0);
  if (cluster.master_addr.empty() && v.has("SLURM_JOB_NODELIST")) {
    MUSTER_ASSIGN(const auto hosts, expand_nodelist(v.text("SLURM_JOB_NODELIST")));
    cluster.master_addr = hosts.front();
  }
  return {};
}

Found mpi(const Variables& v) {
  struct Names {
    const char *who, *size, *rank, *local_size, *remedy;
  };
  constexpr Names kOpenMpi{"Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun --map-by ppr:1:node --bind-to none"};
  constexpr Names kMpich{"MPICH's mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "mpirun -ppn 1"};
  for (const Names& names : {kOpenMpi, kMpich}) {
    if (!v.has(names.size) || !v.has(names.rank)) continue;
    Cluster cluster{names.who, v.number(names.size, 0), v.number(names.rank, -1)};
    if (const int local = v.number(names.local_size, 1); local > 1)
      return several_agents(names.who, local, 1, names.remedy);
    MUSTER_TRY(find_master(v, cluster));
    return cluster;
  }
  return std::nullopt;
}

// PMIx gives the number of this process, but not how many processes there are.
Found pmix(const Variables& v) {
  if (!v.has("PMIX_RANK")) return std::nullopt;
  Cluster cluster{"PMIx", 0, v.number("PMIX_RANK", -1)};
  MUSTER_TRY(find_master(v, cluster));
  return cluster;
}

// Uses the variables of a step (srun), not those of a job, because a batch script runs only on the first node.
Found slurm(const Variables& v) {
  if (!v.has("SLURM_STEP_NODELIST")) return std::nullopt;
  constexpr int kFirstPort = 20000, kPorts = 10000;
  const int job = v.number("SLURM_JOB_ID", 0), step = v.number("SLURM_STEP_ID", 0);
  Cluster cluster{fmt::format("Slurm job {}, step {}", job, step)};
  cluster.nnodes = v.number("SLURM_STEP_NUM_NODES", 0);
  cluster.node_rank = v.number("SLURM_NODEID", -1);
  const int tasks = v.number("SLURM_STEP_NUM_TASKS", cluster.nnodes);
  if (tasks != cluster.nnodes) return several_agents("srun", tasks, cluster.nnodes, "srun --ntasks-per-node=1");
  MUSTER_ASSIGN(const auto hosts, expand_nodelist(v.text("SLURM_STEP_NODELIST")));
  cluster.master_addr = hosts.front();
  // Jobs may share a node, so each uses its own port.
  cluster.master_port = kFirstPort + static_cast<int>((static_cast<int64_t>(job) + step) % kPorts);
  cluster.run_id = fmt::format("slurm-{}.{}", job, step);
  return cluster;
}

Found kubernetes(const Variables& v) {
  if (!v.has("KUBERNETES_SERVICE_HOST")) return std::nullopt;
  Cluster cluster{"Kubernetes"};
  cluster.master_addr = v.text("MASTER_ADDR");
  cluster.master_port = v.number("MASTER_PORT", 0);
  if (v.has("JOB_COMPLETION_INDEX")) {
    cluster.name += v.has("JOBSET_NAME") ? " JobSet " + v.text("JOBSET_NAME") : " Indexed Job";
    cluster.node_rank = v.number("JOB_COMPLETION_INDEX", -1);
    // A JobSet names its pods <jobset>-<job>-<index>-<pod>.<jobset>.
    const std::string host = v.text("HOSTNAME");
    if (const size_t dash = host.rfind('-'); cluster.master_addr.empty() && v.has("JOBSET_NAME") && dash != host.npos)
      cluster.master_addr = host.substr(0, dash) + "-0." + v.text("JOBSET_NAME");
    return cluster;
  }
  // A PyTorchJob. Newer operators set PET_* variables, which have priority.
  if (cluster.master_addr.empty() || !v.has("RANK")) return std::nullopt;
  cluster.name += " PyTorchJob";
  cluster.nnodes = v.number("WORLD_SIZE", 0);
  cluster.node_rank = v.number("RANK", -1);
  // Some operators give the master pod itself "localhost", which other pods cannot reach.
  if (cluster.master_addr == "localhost" && v.has("HOSTNAME")) cluster.master_addr = v.text("HOSTNAME");
  return cluster;
}

}  // namespace

std::vector<std::string> Cluster::options() const {
  std::vector<std::string> words;
  if (nnodes > 0) words.push_back(fmt::format("--nnodes={}", nnodes));
  if (nnodes != 1 && node_rank >= 0) words.push_back(fmt::format("--node-rank={}", node_rank));
  if (nnodes != 1 && !master_addr.empty()) words.push_back("--master-addr=" + master_addr);
  if (nnodes != 1 && master_port > 0) words.push_back(fmt::format("--master-port={}", master_port));
  if (!run_id.empty()) words.push_back("--rdzv-id=" + run_id);
  return words;
}

Result<std::optional<Cluster>> find_cluster(const Environment& environment) {
  const Variables v(environment);
  // A worker inherits these variables from its job. A job that a worker starts has one node unless options say
  // otherwise.
  if (v.has("MUSTER_RUN_ID") || v.has("TORCHELASTIC_RUN_ID")) return std::nullopt;
  for (const auto look : {mpi, slurm, kubernetes, pmix}) {
    MUSTER_ASSIGN(auto found, look(v));
    if (found) return found;
  }
  return std::nullopt;
}

}  // namespace muster
