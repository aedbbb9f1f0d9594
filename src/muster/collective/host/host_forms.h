#pragma once

#include <algorithm>
#include <cstddef>

#include "muster/collective/call.h"

namespace muster {

// Sizes and chunks of the shared-memory forms, in bytes. The forms use them, and so does the prediction (host_plan.h).

/// The most bytes of a step, so that the own chunk and the peers' chunks stay in the second-level cache.
inline constexpr size_t kHostChunk = 128 << 10;
/// Bytes that are combined at a time, so that they are still in the first-level cache when they are copied.
inline constexpr size_t kCachedBytes = 8 << 10;
/// With more bytes, reading the whole data of all ranks costs more than a second wait.
inline constexpr size_t kHostOneShot = 16 << 10;
/// Between two ranks, both forms move the same bytes, and one shot saves the second wait and the copy of the results.
/// For data that is not in caches, neither saving matters.
inline constexpr size_t kHostOneShotOfTwo = 512 << 10;
/// With fewer bytes, the second wait of a collective on shared tensors costs more than a copy.
inline constexpr size_t kMinSharedTensorBytes = 8 << 10;

enum class ReduceForm : uint8_t { kOneShot, kLeader, kTwoShots };

/// The form of an all_reduce or reduce. `has_leader`: see HostComm::has_leader().
constexpr ReduceForm reduce_form(Collective collective, size_t bytes, int ranks, bool has_leader) {
  const bool all = collective == Collective::kAllReduce;
  if (all && has_leader && bytes <= kHostOneShot) return ReduceForm::kLeader;
  return bytes <= (all && ranks == 2 ? kHostOneShotOfTwo : kHostOneShot) ? ReduceForm::kOneShot : ReduceForm::kTwoShots;
}

/// The chunk of forms in which every rank publishes one, in whole elements.
constexpr size_t host_chunk(size_t slot_bytes, size_t element, size_t preferred = kHostChunk) {
  return std::min(preferred, slot_bytes) / element * element;
}

/// The same for blocks of up to `largest` bytes, which are usually one chunk. Never zero.
constexpr size_t chunk_of(size_t largest, size_t slot_bytes, size_t element) {
  const bool one = largest <= std::min(kHostChunk, slot_bytes);
  return one ? std::max<size_t>(largest, 1) : host_chunk(slot_bytes, element);
}

/// The chunk of two shots: after its input, a slot holds the result of one part.
constexpr size_t two_shot_chunk(size_t slot_bytes, int ranks, size_t element) {
  const auto size = static_cast<size_t>(ranks);
  return host_chunk(slot_bytes, element, std::min(kHostChunk, (slot_bytes - 128) / (size + 1) * size));
}

/// The longest piece if a slot carries one for every rank after a header.
constexpr size_t piece_room(size_t slot_bytes, int ranks, size_t element, size_t header = 0) {
  return (std::min(kHostChunk, slot_bytes) - header) / static_cast<size_t>(ranks) / element * element;
}

/// The header of a slot in an all_to_all with different blocks: the counts that its rank sends to each rank.
constexpr size_t uneven_header(int ranks) { return (static_cast<size_t>(ranks) * sizeof(uint64_t) + 63) / 64 * 64; }

/// The length of a piece if a slot carries one for every rank, for blocks of up to `largest` bytes: whole blocks if
/// they fit, else pieces that end on cache lines.
constexpr size_t piece_of(size_t largest, size_t slot_bytes, int ranks, size_t element, size_t header = 0) {
  const size_t all = std::min(kHostChunk, slot_bytes) - header;
  if (largest <= all && largest * static_cast<size_t>(ranks) <= all)
    return largest;  // a small call avoids the division
  const size_t piece = piece_room(slot_bytes, ranks, element, header);
  return piece > 64 ? piece / 64 * 64 : piece;
}

/// The number of chunks of the largest block. At least one, because ranks also compare calls without data.
constexpr size_t chunk_count(size_t largest, size_t chunk) {
  return largest <= chunk ? 1 : (largest + chunk - 1) / chunk;
}

}  // namespace muster
