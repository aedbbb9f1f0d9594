#pragma once

#include <string>

#include "muster/launch/agent/death_notice.h"
#include "muster/launch/options/options.h"

namespace muster {

/// Runs this node's part of the job: finds the job's root, joins the other nodes, starts the workers, and stops them
/// all when one fails anywhere or the user stops the job. Returns the exit status of `muster run`.
/// `own_path`: this program as it was called. `scratch`: a directory for the workers' error files. `death_notice`: the
/// message that the monitor sends to the root if this process is killed. Call it in the child of run_monitored().
int run_agent(const RunOptions& options, const std::string& own_path, const std::string& scratch,
              DeathNotice& death_notice);

}  // namespace muster
