#pragma once

#include <cstdlib>
#include <string_view>

namespace muster {

/// A variable of the environment; empty if it is not set, or set to nothing.
inline std::string_view environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

inline bool is_set(const char* name) { return !environment(name).empty(); }

}  // namespace muster
