#pragma once

#include <string>
#include <vector>

namespace muster {

/// `muster run`: reads its words, and runs this node's agent under a guard or, with --hosts, starts agents elsewhere.
/// `own_path`: this program as it was called. Returns the exit status.
int run_command(const std::string& own_path, const std::vector<std::string>& words);

}  // namespace muster
