#pragma once

#include <algorithm>
#include <cstddef>

#include "muster/collective/call.h"

namespace muster {

// What the shared-memory forms go by: sizes and chunks, in bytes. One place for the forms themselves and for what is
// said of them beforehand (team_plan.h).

/// At most so many bytes a step: what a rank holds of its own and of its peers' chunks stays in its second-level cache.
inline constexpr size_t kHostChunk = 128 << 10;
/// What was combined is still in the first-level cache when it is copied on.
inline constexpr size_t kCachedBytes = 8 << 10;
/// With more bytes, reading everybody's whole data costs more than a second wait.
inline constexpr size_t kHostOneShot = 16 << 10;
/// Between two ranks as many bytes cross either way, so that the second wait and the copy of the results are saved; and
/// where the data comes from memory, neither matters.
inline constexpr size_t kHostOneShotOfTwo = 512 << 10;
/// With fewer bytes, the second wait of working on the tensors themselves costs more than a copy.
inline constexpr size_t kMinSharedTensorBytes = 8 << 10;

enum class ReduceForm : uint8_t { kOneShot, kLeader, kTwoShots };

/// Of an all_reduce or reduce. `hub`: whether the ranks meet by way of rank 0.
constexpr ReduceForm reduce_form(Collective collective, size_t bytes, int ranks, bool has_leader) {
  const bool all = collective == Collective::kAllReduce;
  if (all && has_leader && bytes <= kHostOneShot) return ReduceForm::kLeader;
  return bytes <= (all && ranks == 2 ? kHostOneShotOfTwo : kHostOneShot) ? ReduceForm::kOneShot : ReduceForm::kTwoShots;
}

/// The chunk where every rank puts one, in whole elements.
constexpr size_t host_chunk(size_t slot_bytes, size_t element, size_t wish = kHostChunk) {
  return std::min(wish, slot_bytes) / element * element;
}

/// The same for blocks of up to `largest` bytes, which most often are one chunk; not zero.
constexpr size_t chunk_of(size_t largest, size_t slot_bytes, size_t element) {
  const bool one = largest <= std::min(kHostChunk, slot_bytes);
  return one ? std::max<size_t>(largest, 1) : host_chunk(slot_bytes, element);
}

/// The chunk of two shots: behind its input a slot holds the result of one part.
constexpr size_t two_shot_chunk(size_t slot_bytes, int ranks, size_t element) {
  const auto size = static_cast<size_t>(ranks);
  return host_chunk(slot_bytes, element, std::min(kHostChunk, (slot_bytes - 128) / (size + 1) * size));
}

/// The longest piece where a slot carries one for every rank, behind a header.
constexpr size_t piece_room(size_t slot_bytes, int ranks, size_t element, size_t header = 0) {
  return (std::min(kHostChunk, slot_bytes) - header) / static_cast<size_t>(ranks) / element * element;
}

/// What a slot begins with where blocks differ in an all_to_all: the counts of what its rank sends to each.
constexpr size_t uneven_header(int ranks) { return (static_cast<size_t>(ranks) * sizeof(uint64_t) + 63) / 64 * 64; }

/// The piece of blocks of up to `largest` bytes, of which a slot carries one for every rank: whole blocks, if they fit;
/// where blocks take several, each but the last ends on a cache line.
constexpr size_t piece_of(size_t largest, size_t slot_bytes, int ranks, size_t element, size_t header = 0) {
  const size_t all = std::min(kHostChunk, slot_bytes) - header;
  if (largest <= all && largest * static_cast<size_t>(ranks) <= all) return largest;  // a small call divides nothing
  const size_t piece = piece_room(slot_bytes, ranks, element, header);
  return piece > 64 ? piece / 64 * 64 : piece;
}

/// Chunks of the largest block: at least one, for also an empty call is compared with the peers'.
constexpr size_t chunk_count(size_t largest, size_t chunk) {
  return largest <= chunk ? 1 : (largest + chunk - 1) / chunk;
}

}  // namespace muster
