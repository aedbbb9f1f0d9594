#include "muster/launch/dry_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "muster/launch/agent/hosts.h"
#include "muster/launch/command.h"
#include "muster/launch/workers/worker_environment.h"

namespace muster {
namespace {

std::string line(const std::string& name, const std::string& value) {
  return fmt::format("  {:<12} {}\n", name, value);
}

std::string nodes_text(const RunOptions& o) {
  const std::string count =
      o.elastic() ? fmt::format("{} to {}", o.nnodes_min, o.nnodes_max) : std::to_string(o.nnodes_max);
  if (o.nnodes_max == 1) return count;
  if (o.node_rank) return fmt::format("{}; this is node {}", count, *o.node_rank);
  return count + "; the rank of this node is the order of arrival";
}

std::string rendezvous_text(const RunOptions& o) {
  if (!o.rdzv_url.empty()) return o.rdzv_url;
  if (o.nnodes_max == 1) return "the store of this node";
  return fmt::format("the store of node 0 at tcp://{}:{}", o.master_addr, o.master_port);
}

std::string secret_text(const RunOptions& o) {
  if (!o.secret.empty()) return "given";
  return o.nnodes_max == 1 || !o.hosts.empty() ? "generated for this run"
                                               : "none: anyone who can reach node 0 can join";
}

std::string describe_job(const RunOptions& o) {
  std::string text = o.cluster.empty() ? "" : line("taken from", o.cluster);
  text += line("nodes", nodes_text(o));
  text += line("job", fmt::format("{} (--rdzv-id)", o.run_id));
  text += line("rendezvous", rendezvous_text(o) + (o.tiered ? ", through a proxy on each node" : ""));
  text += line("secret", secret_text(o));
  text += line("restarts", fmt::format("up to {}", o.max_restarts));
  if (!o.log_dir.empty())
    text += line("output", fmt::format("{}/{}_XXXXXX/attempt_N/LOCAL_RANK/", o.log_dir, o.run_id));
  return text;
}

// Returns the variables that are new or different in the worker's environment, as NAME=VALUE.
std::string changes(const Environment& worker, const Environment& base) {
  std::vector<std::string> changed;
  for (const auto& [name, value] : worker) {
    const auto found = base.find(name);
    if (found == base.end() || found->second != value) changed.push_back(name + "=" + value);
  }
  return fmt::format("{}", fmt::join(changed, " "));
}

Result<std::string> describe_workers(const RunOptions& o, const std::string& own_path, const Environment& environment) {
  MUSTER_ASSIGN(const auto command, worker_command(o, own_path, environment));
  MUSTER_ASSIGN(const auto cpus, worker_cpus(o));
  std::string text = line("command", fmt::format("{}", fmt::join(command, " ")));
  text += fmt::format("{} {} on this node{}:\n", o.nproc, o.nproc == 1 ? "worker" : "workers",
                      o.nnodes_max > 1 ? ", ranks if every node has as many" : "");
  const int node = o.node_rank.value_or(0), world = o.nproc * o.nnodes_max;
  JobEnvironment job;
  job.placement = {node, o.nnodes_max, o.nproc, node * o.nproc, world, node * o.nproc, world};
  job.node0_addr = o.nnodes_max == 1 ? "127.0.0.1" : "<address of node 0>";
  Environment before = environment;
  for (auto& spec : worker_specs(o, job, command, environment, cpus)) {
    // These values are secret, or are known only when the job runs.
    if (!spec.environment.contains("MUSTER_TCPSTORE_REDIRECT"))
      spec.environment["MASTER_PORT"] =
          o.nnodes_max == 1 && o.master_port != 0 ? std::to_string(o.master_port) : "<free>";
    spec.environment["MUSTER_STORE"] = "<this node's socket>";
    spec.environment["MUSTER_SECRET"] = "<secret>";
    spec.environment["TORCHELASTIC_ERROR_FILE"] = "<file>";
    text += line(
        fmt::format("rank {}", spec.rank),
        changes(spec.environment, before) + (spec.cpus.empty() ? "" : fmt::format(" (CPUs {})", cpu_list(spec.cpus))));
    before = spec.environment;
  }
  return text;
}

}  // namespace

Result<std::string> describe_run(const RunOptions& options, const std::string& own_path,
                                 const Environment& environment) {
  std::string text = "muster run would start:\n" + describe_job(options);
  if (options.hosts.empty()) {
    MUSTER_ASSIGN(const std::string workers, describe_workers(options, own_path, environment));
    return text + workers;
  }
  std::error_code ignored;
  const std::string directory = std::filesystem::current_path(ignored).string();
  const std::string program = program_path(own_path, environment);
  for (size_t node = 0; node < options.hosts.size(); ++node)
    text += line(fmt::format("node {}", node),
                 fmt::format("{}", fmt::join(host_command(options, node, program, directory, environment), " ")));
  return text;
}

}  // namespace muster
