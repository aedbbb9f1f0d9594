#pragma once

#include <string>
#include <vector>

#include "muster/base/error.h"

namespace muster {

/// A command or a subcommand, as the shell's completion offers it.
struct CommandSyntax {
  std::string name, summary;
  std::vector<CommandSyntax> subcommands;
  std::vector<std::string> options;
};

/// The output of `muster completion SHELL`: a script for bash, zsh or fish that calls `program completion words ...`
/// for each completion.
Result<std::string> completion_script(const std::string& shell, const std::string& program);

/// The answer to that call: a line "word<tab>description" for each word that completes the last of `words`. `words` are
/// the words after `muster` up to the cursor. Empty if the word may be a file name. The options of `muster run` and
/// their values come from the option table, as the help does.
std::string completions(const std::vector<std::string>& words, const std::vector<CommandSyntax>& commands);

}  // namespace muster
