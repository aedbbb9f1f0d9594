#include "muster/launch/dry_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "muster/launch/agent/hosts.h"
#include "muster/launch/command.h"
#include "muster/launch/workers/worker_environment.h"

namespace muster {
namespace {

class Description {
 public:
  void line(const char* name, const std::string& value) { text_ += fmt::format("  {:<12} {}\n", name, value); }
  void heading(const std::string& words) { text_ += words + "\n"; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

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

void describe_job(const RunOptions& o, Description& d) {
  if (!o.cluster.empty()) d.line("taken from", o.cluster);
  d.line("nodes", nodes_text(o));
  d.line("job", fmt::format("{} (--rdzv-id)", o.run_id));
  d.line("rendezvous", rendezvous_text(o) + (o.tiered ? ", through a proxy on each node" : ""));
  d.line("secret", secret_text(o));
  d.line("restarts", fmt::format("up to {}", o.max_restarts));
  if (!o.log_dir.empty()) d.line("output", fmt::format("{}/{}_XXXXXX/attempt_N/LOCAL_RANK/", o.log_dir, o.run_id));
}

// Returns the variables that are new or different in the worker's environment.
Environment difference(const Environment& worker, const Environment& base) {
  Environment changed;
  for (const auto& [name, value] : worker) {
    const auto found = base.find(name);
    if (found == base.end() || found->second != value) changed[name] = value;
  }
  return changed;
}

std::string assignments(const Environment& environment) {
  std::string text;
  for (const auto& [name, value] : environment) text += fmt::format(" {}={}", name, value);
  return text.empty() ? text : text.substr(1);
}

JobEnvironment job_of(const RunOptions& o) {
  JobEnvironment job = job_environment(o);
  const int node = o.node_rank.value_or(0), world = o.nproc * o.nnodes_max;
  job.placement = {node, o.nnodes_max, o.nproc, node * o.nproc, world, node * o.nproc, world};
  return job;
}

Result<> describe_workers(const RunOptions& o, const std::string& own_path, const Environment& environment,
                          Description& d) {
  MUSTER_ASSIGN(const auto command, worker_command(o, own_path, environment));
  MUSTER_ASSIGN(const auto cpus, worker_cpus(o));
  d.line("command", fmt::format("{}", fmt::join(command, " ")));
  d.heading(fmt::format("{} {} on this node{}:", o.nproc, o.nproc == 1 ? "worker" : "workers",
                        o.nnodes_max > 1 ? ", ranks if every node has as many" : ""));
  Environment before = environment;
  for (auto& spec : worker_specs(o, job_of(o), command, environment, cpus)) {
    // These values are secret, or are known only when the job runs.
    spec.environment["MASTER_PORT"] =
        o.nnodes_max == 1 && o.master_port != 0 ? std::to_string(o.master_port) : "<free>";
    spec.environment["MUSTER_STORE"] = "<this node's socket>";
    spec.environment["MUSTER_SECRET"] = "<secret>";
    spec.environment["TORCHELASTIC_ERROR_FILE"] = "<file>";
    d.line(fmt::format("rank {}", spec.rank).c_str(),
           assignments(difference(spec.environment, before)) +
               (spec.cpus.empty() ? "" : fmt::format(" (CPUs {})", cpu_list(spec.cpus))));
    before = spec.environment;
  }
  return {};
}

}  // namespace

Result<std::string> describe_run(const RunOptions& options, const std::string& own_path,
                                 const Environment& environment) {
  Description d;
  d.heading("muster run would start:");
  describe_job(options, d);
  if (options.hosts.empty()) {
    MUSTER_TRY(describe_workers(options, own_path, environment, d));
    return d.text();
  }
  std::error_code ignored;
  const std::string directory = std::filesystem::current_path(ignored).string();
  const std::string program = program_path(own_path, environment);
  for (size_t node = 0; node < options.hosts.size(); ++node)
    d.line(fmt::format("node {}", node).c_str(),
           fmt::format("{}", fmt::join(host_command(options, node, program, directory, environment), " ")));
  return d.text();
}

}  // namespace muster
