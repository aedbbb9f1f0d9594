#pragma once

#include <string>

#include "muster/launch/options/options.h"

namespace muster {

/// The output of --dry-run: the rendezvous, the command of the workers, and their environment. The job's secret is not
/// in it. Starts nothing and opens no port. The error names a script or program that is missing.
Result<std::string> describe_run(const RunOptions& options, const std::string& own_path,
                                 const Environment& environment);

}  // namespace muster
