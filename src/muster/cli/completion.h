#pragma once

#include <string>
#include <vector>

#include "muster/base/error.h"

namespace muster {

/// What follows a command or a subcommand: the words that it takes first, or in any place where they begin with a dash.
struct CommandWords {
  std::string name;
  std::vector<CommandWords> subcommands;
  std::vector<std::string> options;
};

/// What `muster completion SHELL` prints: a script for bash, zsh or fish that completes the names of commands, their
/// subcommands with their options, and the options of `muster run` with the words that they take, from the same table
/// as the help.
Result<std::string> completion_script(const std::string& shell, const std::vector<CommandWords>& commands);

}  // namespace muster
