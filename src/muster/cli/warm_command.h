#pragma once

#include <string>
#include <vector>

namespace muster {

/// `muster warm [--preload MODULE] [--idle SECONDS]`, `muster warm status`, `muster warm stop`.
int warm_command(const std::string& own_path, const std::vector<std::string>& words);

}  // namespace muster
