#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "muster/base/dtype.h"

namespace muster {

/// Sent to peers: append only.
enum class Collective : uint8_t {
  kAllReduce = 1,
  kBroadcast = 2,
  kAllGather = 3,
  kBarrier = 4,
  kReduce = 5,
  kScatter = 6,
  kGather = 7,
  kReduceScatter = 8,
  kAllToAll = 9,
};
inline constexpr int kCollectiveCount = 10;  ///< including the unused zero
const char* name(Collective collective);
constexpr bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduce ||
         collective == Collective::kReduceScatter;
}
constexpr bool has_root(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kReduce ||
         collective == Collective::kScatter || collective == Collective::kGather;
}
/// True if the input has one block for each rank (operation.h).
constexpr bool has_input_blocks(Collective collective) {
  return collective == Collective::kScatter || collective == Collective::kReduceScatter ||
         collective == Collective::kAllToAll;
}
/// True if the output has one block for each rank.
constexpr bool has_output_blocks(Collective collective) {
  return collective == Collective::kGather || collective == Collective::kAllGather ||
         collective == Collective::kAllToAll;
}

/// One call of a collective. All ranks must make equal calls: ranks compare them, and errors name them.
struct Call {
  Collective collective = Collective::kBarrier;
  Dtype dtype = Dtype::kUint8;
  ReduceOp op = ReduceOp::kSum;
  Rank root = 0;
  /// Elements of the tensor, or of one rank's block (operation.h). If blocks differ, elements of all blocks together;
  /// zero for all_to_all, where each rank may send different amounts.
  uint64_t count = 0;
  uint64_t layout = 0;    ///< a digest of the counts of blocks that differ; zero: equal blocks
  uint64_t sequence = 0;  ///< the group's number for the call

  size_t bytes() const { return count * size_of(dtype); }
  /// "all_reduce #41 (float32[1048576], sum)".
  std::string to_string() const;
  std::array<uint64_t, 4> pack() const {
    const uint64_t kinds = static_cast<uint64_t>(collective) | static_cast<uint64_t>(dtype) << 8 |
                           static_cast<uint64_t>(op) << 16 | static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32;
    return {kinds, count, sequence, layout};
  }
  static Call unpack(const std::array<uint64_t, 4>& words);
  friend bool operator==(const Call&, const Call&) = default;
};

}  // namespace muster
