#pragma once

#include <string>
#include <vector>

namespace muster {

/// `muster explain COLLECTIVE [--bytes N] [--ranks N] [--nodes N] [--rank R] [--root R] [--links KIND]`: which form
/// or algorithm runs, what it is predicted to take, and its steps. Returns 0; 2 for a wrong command line. `own_path` is
/// unused; see main.cpp.
int explain_command(const std::string& own_path, const std::vector<std::string>& words);

}  // namespace muster
