#pragma once

#include <string>

namespace muster {

/// Prints the broken invariant, its file and its line, and aborts. For bugs only: an expected failure is an Error.
[[noreturn]] void check_failed(const char* expression, const char* file, int line, const std::string& message);

}  // namespace muster

/// Aborts with `message` when `condition` is false, in every build type.
#define MUSTER_CHECK(condition, message)                               \
  do {                                                                 \
    if (!(condition)) [[unlikely]]                                     \
      ::muster::check_failed(#condition, __FILE__, __LINE__, message); \
  } while (false)
