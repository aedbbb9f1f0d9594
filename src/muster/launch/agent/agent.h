#pragma once

#include <string>

#include "muster/launch/agent/death_notice.h"
#include "muster/launch/options/options.h"

namespace muster {

/// This node's part of the job from beginning to end: joins the job's store, meets the other nodes, starts the workers,
/// and ends them all when one fails anywhere or the user says so. Returns the exit status of `muster run`.
/// `own_path`: this program as it was called. `scratch`: a folder for the workers' error files. `last_word`: for the
/// guard to say should this process be killed.
/// To be called in the child of run_guarded().
int run_agent(const RunOptions& options, const std::string& own_path, const std::string& scratch,
              DeathNotice& last_word);

}  // namespace muster
