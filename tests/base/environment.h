#pragma once

#include <cstdint>
#include <cstdlib>

namespace muster::test {

/// The number in an environment variable, such as MUSTER_SEED. If it is not set: `otherwise`.
inline uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace muster::test
