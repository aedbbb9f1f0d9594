#pragma once

#include <string>
#include <vector>

#include "muster/launch/options.h"

namespace muster {

/// Python for the workers: $MUSTER_PYTHON, else the python3 beside the muster program (a virtual environment's), else
/// the one on PATH. `own_path` is this program as it was called (argv[0]). kNotFound when there is none.
Result<std::string> find_python(const std::string& own_path, const Environment& environment);

/// The words that start a worker; the first is the path of a program that exists. A script or program that is missing
/// or not executable is kNotFound or kInvalidArgument and names the path.
Result<std::vector<std::string>> worker_command(const RunOptions& options, const std::string& own_path,
                                                const Environment& environment);

}  // namespace muster
