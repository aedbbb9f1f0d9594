#pragma once

#include <string>

#include "muster/launch/options/options.h"

namespace muster {

/// The output of --dry-run: the rendezvous, the command of the workers, and their environment, without the job's
/// secret. Starts no process and opens no port. Fails if a script or program is missing; the message names it.
Result<std::string> describe_run(const RunOptions& options, const std::string& own_path,
                                 const Environment& environment);

}  // namespace muster
