#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// A program's path as a shell would find it: a word with a slash is a path, any other is looked for on PATH. kNotFound
/// or kInvalidArgument says why it cannot be started.
Result<std::string> find_program(const std::string& word, const Environment& environment);

/// The absolute path of this program, as it was called (a link in a virtual environment stays one).
std::string program_path(const std::string& own_path, const Environment& environment);

/// Python for the workers: $MUSTER_PYTHON or torchrun's $PYTHON_EXEC, else the python3 beside the muster program (a
/// virtual environment's), else the one on PATH. `own_path` is this program as it was called (argv[0]). kNotFound when
/// there is none.
Result<std::string> find_python(const std::string& own_path, const Environment& environment);

/// The words that start a worker; the first is the path of a program that exists. A script or program that is missing
/// or not executable is kNotFound or kInvalidArgument and names the path.
Result<std::vector<std::string>> worker_command(const RunOptions& options, const std::string& own_path,
                                                const Environment& environment);

}  // namespace muster
