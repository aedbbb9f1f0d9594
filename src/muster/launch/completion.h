#pragma once

#include <string>
#include <vector>

#include "muster/base/error.h"

namespace muster {

/// What `muster completion SHELL` prints: a script for bash, zsh or fish that completes the names of commands, and the
/// options of `muster run` with the words that they take, from the same table as the help.
Result<std::string> completion_script(const std::string& shell, const std::vector<std::string>& commands);

}  // namespace muster
