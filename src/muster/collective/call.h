#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "muster/base/dtype.h"

namespace muster {

/// Sent to peers: append only.
enum class Collective : uint8_t { kAllReduce = 1, kBroadcast = 2, kAllGather = 3, kBarrier = 4 };
const char* name(Collective collective);

/// One call of a collective, as every rank must make it alike: what errors name, and what ranks compare.
struct Call {
  Collective collective = Collective::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  uint64_t count = 0;     ///< elements; all_gather: of each rank's input
  uint64_t sequence = 0;  ///< the group's number for the call

  size_t bytes() const { return count * size_of(dtype); }
  /// "all_reduce #41 (float32[1048576], sum)".
  std::string to_string() const;
  std::array<uint64_t, 4> pack() const;
  static Call unpack(const std::array<uint64_t, 4>& words);
  friend bool operator==(const Call&, const Call&) = default;
};

}  // namespace muster
