#pragma once

#include <string>
#include <vector>

#include "muster/launch/options/options.h"

namespace muster {

/// Finds a program as a shell does: a word with a slash is a path, other words are searched on PATH. kNotFound or
/// kInvalidArgument if the program cannot be started; the message says why.
Result<std::string> find_program(const std::string& word, const Environment& environment);

/// The absolute path of this program, as it was called (a link in a virtual environment stays one).
std::string program_path(const std::string& own_path, const Environment& environment);

/// Python for the workers: $MUSTER_PYTHON or torchrun's $PYTHON_EXEC, else the python3 next to the muster program (as
/// in a virtual environment), else the one on PATH. `own_path` is this program as it was called (argv[0]). kNotFound if
/// there is none.
Result<std::string> find_python(const std::string& own_path, const Environment& environment);

/// Saves the program on standard input as an executable file in `directory`. Returns its path. kResourceExhausted if it
/// has more than 256 MiB.
Result<std::string> save_stdin(const std::string& directory);

/// The command of a worker. Its first word is the path of a program that exists. kNotFound or kInvalidArgument if a
/// script or program is missing or not executable; the message names it.
Result<std::vector<std::string>> worker_command(const RunOptions& options, const std::string& own_path,
                                                const Environment& environment);

}  // namespace muster
