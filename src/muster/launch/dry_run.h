#pragma once

#include <string>

#include "muster/launch/options/options.h"

namespace muster {

/// What --dry-run prints: where this node's workers meet the others, what would be started, and with which environment.
/// The job's secret is not in it. Starts nothing and listens nowhere. The error of a script or program that is missing.
Result<std::string> describe_run(const RunOptions& options, const std::string& own_path,
                                 const Environment& environment);

}  // namespace muster
