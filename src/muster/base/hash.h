#pragma once

#include <cstdint>
#include <type_traits>

namespace muster {

/// FNV-1a over a range of integers; each integer is one step, at any width. Source: Fowler, Noll and Vo,
/// draft-eastlake-fnv.
template <class Range>
constexpr uint64_t fnv1a(const Range& values, uint64_t hash = 0xcbf29ce484222325) {
  for (const auto value : values) {
    hash = (hash ^ static_cast<std::make_unsigned_t<std::decay_t<decltype(value)>>>(value)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace muster
