#pragma once

#include <string_view>

namespace muster {

enum class LogLevel { kTrace, kDebug, kInfo, kWarning, kError };  // as in spdlog

/// Writes one line to stderr through spdlog. The first call reads the level from MUSTER_LOG (trace, debug, info,
/// warning, error, off; warning when unset). Thread-safe.
void log(LogLevel level, std::string_view message);
/// True if a line of this level would be written. For messages that are expensive to build.
bool log_enabled(LogLevel level);

}  // namespace muster
