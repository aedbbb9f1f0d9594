#pragma once

#include <fmt/format.h>

#include <optional>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/log.h"

namespace muster {

/// Writes at most one warning per second and counts the others. For warnings that unauthenticated peers can cause. Not
/// thread-safe.
class RateLimitedLog {
 public:
  explicit RateLimitedLog(const Clock& clock) : clock_(clock) {}
  void warn(const std::string& message) {
    const TimePoint now = clock_.now();
    if (last_ && now - *last_ < 1s) {
      ++left_out_;
      return;
    }
    const std::string more = left_out_ == 0 ? "" : fmt::format(" ({} more like this since the last line)", left_out_);
    log(LogLevel::kWarning, message + more);
    last_ = now;
    left_out_ = 0;
  }

 private:
  const Clock& clock_;
  std::optional<TimePoint> last_;
  size_t left_out_ = 0;
};

}  // namespace muster
