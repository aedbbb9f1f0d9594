#pragma once

#include <fmt/format.h>

#include <string>

#include "muster/base/clock.h"

namespace muster {

// Numbers in step reports: "4.1 ms", "0.25" (MiB).

inline double in_milliseconds(Duration duration) { return static_cast<double>(duration.count()) / 1e6; }

inline std::string milliseconds(Duration duration) {
  const double value = in_milliseconds(duration);
  return fmt::format("{:.{}f} ms", value, value < 0.1 ? 3 : value < 10 ? 2 : 1);
}

inline std::string mebibytes(size_t bytes) {
  const double value = static_cast<double>(bytes) / (1 << 20);
  return fmt::format("{:.{}f}", value, value < 0.1 ? 3 : value < 10 ? 2 : 1);
}

}  // namespace muster
