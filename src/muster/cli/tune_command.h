#pragma once

#include <string>
#include <vector>

namespace muster {

/// `muster tune [--show]`: measures what links and reductions cost on this machine, for some seconds, and keeps it for
/// the groups that are formed later; --show prints what is kept. Returns 0; 1 where it cannot be measured or kept; 2
/// for a wrong command line. `own_path` is unused; see main.cpp.
int tune_command(const std::string& own_path, const std::vector<std::string>& words);

}  // namespace muster
