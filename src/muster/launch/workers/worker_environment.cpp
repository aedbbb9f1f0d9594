#include "muster/launch/workers/worker_environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "muster/io/address.h"
#include "muster/launch/options/option_values.h"

namespace muster {
namespace {

// Returns a worker's device among the devices that the node's workers may see. If there are too few, returns "", which
// hides all devices.
std::string device_of(int local_rank, const Environment& base, const char* variable) {
  const auto visible = base.find(variable);
  if (visible == base.end()) return std::to_string(local_rank);
  const auto devices = split_list(visible->second);
  return static_cast<size_t>(local_rank) < devices.size() ? devices[static_cast<size_t>(local_rank)] : "";
}

// The port of node 0's store. With an external store that port is any free one, so all nodes use torchrun's default.
uint16_t master_port(const RunOptions& options) {
  return options.master_port != 0 ? options.master_port : uint16_t{29500};
}

// Replaces torchrun's macro in the arguments of a script.
std::vector<std::string> with_local_rank(std::vector<std::string> command, int local_rank) {
  constexpr std::string_view kMacro = "${local_rank}";
  for (auto& word : command)
    for (size_t at = 0; (at = word.find(kMacro, at)) != std::string::npos;)
      word.replace(at, kMacro.size(), std::to_string(local_rank));
  return command;
}

}  // namespace

Environment worker_environment(const RunOptions& options, const JobEnvironment& job, int local_rank, Environment base) {
  const Placement& placement = job.placement;
  const std::string rank = std::to_string(placement.first_rank + local_rank);
  // Clients of PyTorch's TCPStore reach the job's store through a loopback port of their node.
  const HostPort proxy{"127.0.0.1", job.torch_port};
  const bool reachable = options.reachable_master_addr && options.nnodes_max > 1;
  const HostPort master = reachable ? HostPort{job.node0_addr, master_port(options)} : proxy;
  std::error_code ignored;
  const Environment fixed = {
      {"LOCAL_RANK", std::to_string(options.virtual_local_rank ? 0 : local_rank)},
      {"RANK", rank},
      {"ROLE_RANK", std::to_string(placement.first_role_rank + local_rank)},
      {"GROUP_RANK", std::to_string(placement.node_rank)},
      {"ROLE_NAME", options.role},
      {"LOCAL_WORLD_SIZE", std::to_string(placement.nproc)},
      {"WORLD_SIZE", std::to_string(placement.world_size)},
      {"ROLE_WORLD_SIZE", std::to_string(placement.role_world_size)},
      {"GROUP_WORLD_SIZE", std::to_string(placement.nnodes)},
      {"MASTER_ADDR", master.host},
      {"MASTER_PORT", std::to_string(master.port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(job.restart_count)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)},
      {"TORCHELASTIC_RUN_ID", options.run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"MUSTER_STORE", job.store_url},
      {"MUSTER_SECRET", to_hex(job.secret)},
      {"MUSTER_GENERATION", std::to_string(job.generation)},
      {"MUSTER_RUN_ID", options.run_id},
      {"MUSTER_NODE0_ADDR", job.node0_addr},
      {"MUSTER_BIN", std::filesystem::read_symlink("/proc/self/exe", ignored)},
  };
  // Of a launcher of MPI that has started this node's agent: a worker is none of its ranks.
  std::erase_if(base, [](const auto& variable) {
    const std::string& name = variable.first;
    return name.starts_with("PMI_") || name.starts_with("PMIX_") || name.starts_with("OMPI_COMM_WORLD_");
  });
  for (const auto& [name, value] : fixed) base[name] = value;
  if (options.virtual_local_rank) {
    for (const char* variable : {"CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"}) {
      base[variable] = device_of(local_rank, base, variable);
    }
  }
  if (options.replace_gloo) base["MUSTER_REPLACE"] = "gloo";
  // python/muster/_torch_patches.py reads it.
  base.erase("MUSTER_TCPSTORE_REDIRECT");
  if (reachable) {
    base["MUSTER_TCPSTORE_REDIRECT"] = fmt::format("{}:{}={}:{}", master.host, master.port, proxy.host, proxy.port);
  }
  if (!job.interface.empty()) base["MUSTER_INTERFACE"] = job.interface;
  return shared_environment(std::move(base), job.cpus, placement.nproc);
}

Environment shared_environment(Environment base, int cpus, int nproc) {
  base.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, cpus / std::max(1, nproc))));
  base.emplace("PYTHONUNBUFFERED", "1");
  return base;
}

std::vector<WorkerSpec> worker_specs(const RunOptions& options, const JobEnvironment& job,
                                     const std::vector<std::string>& command, const Environment& base,
                                     const std::vector<Cpus>& cpus) {
  std::vector<WorkerSpec> specs;
  for (int local = 0; local < options.nproc; ++local) {
    WorkerSpec spec{job.placement.first_rank + local, with_local_rank(command, local),
                    worker_environment(options, job, local, base)};
    // Workers write to pipes. This variable tells them whether a terminal shows their output, for progress bars.
    spec.environment["MUSTER_TERMINAL"] = ::isatty(STDOUT_FILENO) == 1 ? '1' : '0';
    // A background process group cannot read the terminal. Rank 0 keeps a standard input that is a file or a pipe.
    spec.keeps_stdin = spec.rank == 0 && !options.until_stdin_ends && ::isatty(STDIN_FILENO) == 0;
    if (!cpus.empty()) spec.cpus = cpus[static_cast<size_t>(local)];
    specs.push_back(std::move(spec));
  }
  return specs;
}

Result<std::vector<Cpus>> worker_cpus(const RunOptions& options) {
  if (options.numa_binding == NumaBinding::kNone) return std::vector<Cpus>();
  NumaTopology topology = read_numa_topology();
  // A container shows all devices on the bus, but has device files only for its own devices. Then the devices are not
  // known.
  const bool known = topology.devices.size() == static_cast<size_t>(count_gpus());
  topology.devices = known ? visible_devices(topology.devices, current_environment()) : std::vector<int>();
  return bind_workers(options.numa_binding, options.nproc, topology);
}

}  // namespace muster
