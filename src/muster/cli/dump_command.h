#pragma once

#include <string>
#include <vector>

namespace muster {

/// `muster dump [PID...]`, `muster dump --job RUN_ID`: what the groups of running ranks did last, and what they wait
/// for, read from their memory: they may hang, or be stopped. Returns 0; 1 when nothing was found; 2 for a wrong
/// command line. `own_path` is unused; see main.cpp.
int dump_command(const std::string& own_path, const std::vector<std::string>& words);

/// `muster trace [-o FILE] [PID...]`: the same as a trace for Perfetto, of all ranks on one clock.
int trace_command(const std::string& own_path, const std::vector<std::string>& words);

}  // namespace muster
