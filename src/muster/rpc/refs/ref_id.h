#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace muster::rpc {

/// Names a remote reference. No other reference of the job has the same one, because ids of workers are unique.
struct RefId {
  int creator = -1;     ///< the id of the worker that created it
  uint64_t number = 0;  ///< counted by the creator

  friend auto operator<=>(const RefId&, const RefId&) = default;
};

}  // namespace muster::rpc

template <>
struct std::hash<muster::rpc::RefId> {
  size_t operator()(const muster::rpc::RefId& id) const noexcept {
    return std::hash<uint64_t>()(id.number * 0x9E3779B97F4A7C15 ^ static_cast<uint64_t>(id.creator));
  }
};
