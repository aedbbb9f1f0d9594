#include "muster/launch/workers/worker_specs.h"

#include <unistd.h>

#include <string_view>

#include "muster/launch/options/devices.h"

namespace muster {

namespace {

// torchrun's one macro in a script's words.
std::vector<std::string> with_local_rank(std::vector<std::string> command, int local_rank) {
  constexpr std::string_view kMacro = "${local_rank}";
  for (auto& word : command)
    for (size_t at = 0; (at = word.find(kMacro, at)) != std::string::npos;)
      word.replace(at, kMacro.size(), std::to_string(local_rank));
  return command;
}

}  // namespace

std::vector<WorkerSpec> worker_specs(const RunOptions& options, const JobEnvironment& job,
                                     const std::vector<std::string>& command, const Environment& base,
                                     const std::vector<Cpus>& cpus) {
  std::vector<WorkerSpec> specs;
  for (int local = 0; local < options.nproc; ++local) {
    WorkerSpec spec{job.placement.first_rank + local, with_local_rank(command, local),
                    worker_environment(job, local, base)};
    // Workers write to pipes: this tells them whether a terminal shows what they write, and so whether to draw a bar.
    spec.environment["MUSTER_TERMINAL"] = ::isatty(STDOUT_FILENO) == 1 ? '1' : '0';
    // A background process group may not read the terminal; a file or a pipe goes to rank 0.
    spec.keeps_stdin = spec.rank == 0 && !options.until_stdin_ends && ::isatty(STDIN_FILENO) == 0;
    if (!cpus.empty()) spec.cpus = cpus[static_cast<size_t>(local)];
    specs.push_back(std::move(spec));
  }
  return specs;
}

Result<std::vector<Cpus>> worker_cpus(const RunOptions& options) {
  if (options.numa_binding == NumaBinding::kNone) return std::vector<Cpus>();
  MUSTER_ASSIGN(NumaTopology topology, read_numa_topology());
  // A container shows all devices on the bus, and has files for its own: which they are is not known then.
  const bool known = topology.devices.size() == static_cast<size_t>(count_gpus());
  topology.devices = known ? visible_devices(topology.devices, current_environment()) : std::vector<int>();
  return bind_workers(options.numa_binding, options.nproc, topology);
}

}  // namespace muster
