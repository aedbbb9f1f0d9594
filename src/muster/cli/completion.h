#pragma once

#include <string>
#include <vector>

#include "muster/base/error.h"

namespace muster {

/// What the shell's completion knows about a command or a subcommand.
struct CommandSyntax {
  std::string name, summary;
  std::vector<CommandSyntax> subcommands;
  std::vector<std::string> options;
};

/// What `muster completion SHELL` prints: a script for bash, zsh or fish that calls `program completion words ...` for
/// each completion.
Result<std::string> completion_script(const std::string& shell, const std::string& program);

/// The answer to that call: a line "word<tab>description" for each word that may stand in place of the last of `words`,
/// which are the words after `muster` up to the cursor. Empty where a file may stand. The options of `muster run` and
/// their values come from the table that the help comes from.
std::string completions(const std::vector<std::string>& words, const std::vector<CommandSyntax>& commands);

}  // namespace muster
