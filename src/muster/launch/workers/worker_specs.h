#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"
#include "muster/launch/workers/numa.h"
#include "muster/launch/workers/worker.h"
#include "muster/launch/workers/worker_environment.h"

namespace muster {

/// The workers of this node in the order of their local ranks, all but the error file, which is the output's affair.
/// `cpus`: of each worker; empty: all.
std::vector<WorkerSpec> worker_specs(const RunOptions& options, const JobEnvironment& job,
                                     const std::vector<std::string>& command, const Environment& base,
                                     const std::vector<Cpus>& cpus);

/// What bind_workers() says for this machine; nothing without --numa-binding.
Result<std::vector<Cpus>> worker_cpus(const RunOptions& options);

}  // namespace muster
