#include "muster/launch/workers/worker_environment.h"

#include <algorithm>

#include "muster/launch/options/option_values.h"

namespace muster {
namespace {

// One of the devices that the node's workers may see; a worker beyond them gets none ("" hides all).
std::string device_of(int local_rank, const Environment& base) {
  const auto visible = base.find("CUDA_VISIBLE_DEVICES");
  if (visible == base.end()) return std::to_string(local_rank);
  const auto devices = split_list(visible->second);
  return static_cast<size_t>(local_rank) < devices.size() ? devices[static_cast<size_t>(local_rank)] : "";
}

}  // namespace

Environment worker_environment(const JobEnvironment& job, int local_rank, Environment base) {
  const Placement& place = job.placement;
  const std::string rank = std::to_string(place.first_rank + local_rank);
  const Environment fixed = {
      {"LOCAL_RANK", std::to_string(job.virtual_local_rank ? 0 : local_rank)},
      {"RANK", rank},
      {"ROLE_RANK", std::to_string(place.first_role_rank + local_rank)},
      {"GROUP_RANK", std::to_string(place.node_rank)},
      {"ROLE_NAME", job.role},
      {"LOCAL_WORLD_SIZE", std::to_string(place.nproc)},
      {"WORLD_SIZE", std::to_string(place.world_size)},
      {"ROLE_WORLD_SIZE", std::to_string(place.role_world_size)},
      {"GROUP_WORLD_SIZE", std::to_string(place.nnodes)},
      // Stock clients meet in the one job store through their own node's port: none is open on the network.
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", std::to_string(job.torch_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(job.restart_count)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(job.max_restarts)},
      {"TORCHELASTIC_RUN_ID", job.run_id},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"MUSTER_STORE", job.store_url},
      {"MUSTER_SECRET", to_hex(job.secret)},
      {"MUSTER_GENERATION", std::to_string(job.generation)},
      {"MUSTER_RUN_ID", job.run_id},
  };
  for (const auto& [name, value] : fixed) base[name] = value;
  if (job.virtual_local_rank) base["CUDA_VISIBLE_DEVICES"] = device_of(local_rank, base);
  if (!job.interface.empty()) base["MUSTER_INTERFACE"] = job.interface;
  return shared_environment(std::move(base), job.cpus, place.nproc);
}

Environment shared_environment(Environment base, int cpus, int nproc) {
  base.emplace("OMP_NUM_THREADS", std::to_string(std::max(1, cpus / std::max(1, nproc))));
  base.emplace("PYTHONUNBUFFERED", "1");
  return base;
}

}  // namespace muster
