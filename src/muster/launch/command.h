#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// The path of a program as a shell finds it: a word with a slash is a path, other words are searched on PATH.
/// kNotFound or kInvalidArgument says why it cannot be started.
Result<std::string> find_program(const std::string& word, const Environment& environment);

/// The absolute path of this program, as it was called (a link in a virtual environment stays one).
std::string program_path(const std::string& own_path, const Environment& environment);

/// Python for the workers: $MUSTER_PYTHON or torchrun's $PYTHON_EXEC, else the python3 next to the muster program (as
/// in a virtual environment), else the one on PATH. `own_path` is this program as it was called (argv[0]). kNotFound if
/// there is none.
Result<std::string> find_python(const std::string& own_path, const Environment& environment);

/// The command of a worker. Its first word is the path of a program that exists. kNotFound or kInvalidArgument names a
/// script or program that is missing or not executable.
Result<std::vector<std::string>> worker_command(const RunOptions& options, const std::string& own_path,
                                                const Environment& environment);

}  // namespace muster
