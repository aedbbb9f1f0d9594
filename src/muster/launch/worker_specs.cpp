#include "muster/launch/worker_specs.h"

#include <unistd.h>

namespace muster {

std::vector<WorkerSpec> worker_specs(const RunOptions& options, const JobEnvironment& job,
                                     const std::vector<std::string>& command, const Environment& base,
                                     const std::vector<Cpus>& cpus) {
  std::vector<WorkerSpec> specs;
  for (int local = 0; local < options.nproc; ++local) {
    WorkerSpec spec{job.placement.first_rank + local, command, worker_environment(job, local, base)};
    // Workers write to pipes: this tells them whether a terminal shows what they write, and so whether to draw a bar.
    spec.environment["MUSTER_TERMINAL"] = ::isatty(STDOUT_FILENO) == 1 ? "1" : "0";
    // A background process group may not read the terminal; a file or a pipe goes to rank 0.
    spec.keeps_stdin = spec.rank == 0 && !options.until_stdin_ends && ::isatty(STDIN_FILENO) == 0;
    if (!cpus.empty()) spec.cpus = cpus[static_cast<size_t>(local)];
    specs.push_back(std::move(spec));
  }
  return specs;
}

Result<std::vector<Cpus>> worker_cpus(const RunOptions& options) {
  if (options.numa_binding == NumaBinding::kNone) return std::vector<Cpus>();
  MUSTER_ASSIGN(const NumaTopology topology, read_numa_topology());
  return bind_workers(options.numa_binding, options.nproc, topology);
}

}  // namespace muster
