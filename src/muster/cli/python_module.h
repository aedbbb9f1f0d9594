#pragma once

#include <string>
#include <vector>

namespace muster {

/// Becomes a Python that runs `module`, which is muster's, as `python -m` would. Returns only what `muster` is to end
/// with where that fails, having said why; a Python without muster says so itself.
int run_module(const char* module, const std::string& own_path, const std::vector<std::string>& arguments);

}  // namespace muster
