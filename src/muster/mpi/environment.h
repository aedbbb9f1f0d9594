#pragma once

#include <cstdlib>
#include <string_view>

namespace muster::mpi {

/// A variable of the environment; empty if it is not set.
inline std::string_view environment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string_view() : value;
}

}  // namespace muster::mpi
