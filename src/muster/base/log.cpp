#include "muster/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <string>

namespace muster {
namespace {

static_assert(static_cast<int>(LogLevel::kTrace) == SPDLOG_LEVEL_TRACE);
static_assert(static_cast<int>(LogLevel::kError) == SPDLOG_LEVEL_ERROR);
spdlog::level::level_enum to_spdlog(LogLevel level) { return static_cast<spdlog::level::level_enum>(level); }

// Never destroyed: threads that outlive main's statics may still log.
spdlog::logger& logger() {
  static spdlog::logger* const instance = [] {
    auto* made = new spdlog::logger("muster", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("%^muster %L%$ [%P %H:%M:%S.%e] %v");
    made->set_level(spdlog::level::warn);
    if (const char* level = std::getenv("MUSTER_LOG")) {
      const auto parsed = spdlog::level::from_str(level);
      if (parsed == spdlog::level::off && std::string(level) != "off") {
        made->warn("MUSTER_LOG='{}' is not a level; use trace, debug, info, warning, error or off", level);
      } else {
        made->set_level(parsed);
      }
    }
    return made;
  }();
  return *instance;
}

}  // namespace

void log(LogLevel level, std::string_view message) { logger().log(to_spdlog(level), message); }

bool log_enabled(LogLevel level) { return logger().should_log(to_spdlog(level)); }

}  // namespace muster
