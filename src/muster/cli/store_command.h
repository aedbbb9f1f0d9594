#pragma once

#include <string>
#include <vector>

#include "muster/cli/completion.h"

namespace muster {

/// `muster store`: serves a store, or looks into one. `own_path` is unused; see main.cpp. Returns the exit status: 0;
/// 1 when a key is not there, or nothing came in time; 2 for a wrong command line; 3 for a store that cannot be reached
/// or refuses.
int store_command(const std::string& own_path, const std::vector<std::string>& words);

/// Its subcommands, for the shell's completion.
std::vector<CommandWords> store_subcommands();

}  // namespace muster
