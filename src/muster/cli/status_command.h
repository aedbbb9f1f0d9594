#pragma once

#include <string>
#include <vector>

namespace muster {

/// `muster status [--watch] [--json] [RUN_ID]`: the jobs that this user's agents on this host take part in. Returns 0;
/// 1 when there is none; 2 for a wrong command line. `own_path` is unused; see main.cpp.
int status_command(const std::string& own_path, const std::vector<std::string>& words);

}  // namespace muster
