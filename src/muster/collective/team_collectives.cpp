#include "muster/collective/team_collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "muster/collective/reduce.h"

namespace muster {
namespace {

/// Chunks of one-shot stay in a core's L2 together with their double; two-shot pays a wait more a chunk, so larger
/// ones.
constexpr size_t kOneShotChunk = 128 << 10;
constexpr size_t kTwoShotChunk = 512 << 10;
/// With more ranks, reading every slot costs more than the second wait of two-shot.
constexpr int kOneShotRanks = 2;
constexpr size_t kOneShotBytes = 16 << 10;

/// memcpy that takes null for no bytes, as an empty tensor has.
void copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

Result<> check_tag(Team& team, Rank peer, const Operation& mine) {
  if (team.tag(peer) == mine.pack()) return {};
  return fail(ErrorCode::kMismatch,
              fmt::format("rank {} called {} where rank {} called {}; all ranks must make the same calls in the same "
                          "order",
                          peer, Operation::unpack(team.tag(peer)).to_string(), team.rank(), mine.to_string()),
              peer);
}

/// Ends a step that every rank takes part in: publish, wait for all, compare.
Result<> meet(Team& team, const Operation& operation, const Deadline& deadline) {
  team.publish(operation.pack());
  MUSTER_TRY(team.wait_all(deadline));
  for (Rank peer = 0; peer < team.size(); ++peer) {
    if (peer != team.rank()) MUSTER_TRY(check_tag(team, peer, operation));
  }
  return {};
}

/// The slots of this step from byte `offset` on, in rank order.
void slots_at(Team& team, size_t offset, std::vector<const void*>& out) {
  for (Rank peer = 0; peer < team.size(); ++peer) out[peer] = team.slot(peer) + offset;
}

void reduce_all(const Operation& operation, void* out, const std::vector<const void*>& sources, size_t count) {
  const int size = static_cast<int>(sources.size());
  reduce_many(out, sources.data(), size, count, operation.dtype, operation.op);
  if (operation.op == ReduceOp::kAverage) divide_by(out, count, operation.dtype, size);
}

Result<> one_shot(Team& team, const Operation& operation, uint8_t* data, const Deadline& deadline) {
  const size_t element = size_of(operation.dtype);
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes()) / element * element;
  std::vector<const void*> sources(team.size());
  size_t offset = 0;
  do {
    const size_t bytes = std::min(chunk, operation.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    copy(team.slot(), data + offset, bytes);
    MUSTER_TRY(meet(team, operation, deadline));
    slots_at(team, 0, sources);
    reduce_all(operation, data + offset, sources, bytes / element);
    offset += bytes;
  } while (offset < operation.bytes());
  return {};
}

/// Elements [part(r), part(r + 1)) of a chunk belong to rank r; bounds fall on cache lines.
size_t part(Rank rank, int size, size_t count, size_t element) {
  const size_t line = std::max<size_t>(1, 64 / element);
  const size_t lines = (count + line - 1) / line;
  return std::min(count, lines * rank / size * line);
}

Result<> two_shot(Team& team, const Operation& operation, uint8_t* data, const Deadline& deadline) {
  const size_t element = size_of(operation.dtype);
  const size_t chunk = std::min(kTwoShotChunk, team.slot_bytes()) / element * element;
  std::vector<const void*> sources(team.size());
  for (size_t offset = 0; offset < operation.bytes(); offset += chunk) {
    const size_t bytes = std::min(chunk, operation.bytes() - offset);
    const size_t count = bytes / element;
    MUSTER_TRY(team.begin(deadline));
    copy(team.slot(), data + offset, bytes);
    MUSTER_TRY(meet(team, operation, deadline));

    const size_t begin = part(team.rank(), team.size(), count, element);
    const size_t end = part(team.rank() + 1, team.size(), count, element);
    slots_at(team, begin * element, sources);  // of the first step; the result goes into the second step's slot
    MUSTER_TRY(team.begin(deadline));
    reduce_all(operation, team.slot() + begin * element, sources, end - begin);
    MUSTER_TRY(meet(team, operation, deadline));

    for (Rank peer = 0; peer < team.size(); ++peer) {
      const size_t from = part(peer, team.size(), count, element) * element;
      const size_t to = part(peer + 1, team.size(), count, element) * element;
      copy(data + offset + from, team.slot(peer) + from, to - from);
    }
  }
  return {};
}

}  // namespace

Result<> team_all_reduce(Team& team, const Operation& operation, void* data, const Deadline& deadline) {
  auto* bytes = static_cast<uint8_t*>(data);
  const bool few = team.size() <= kOneShotRanks || operation.bytes() <= kOneShotBytes;
  return few ? one_shot(team, operation, bytes, deadline) : two_shot(team, operation, bytes, deadline);
}

Result<> team_broadcast(Team& team, const Operation& operation, void* data, const Deadline& deadline) {
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes());
  auto* bytes = static_cast<uint8_t*>(data);
  size_t offset = 0;
  do {
    const size_t step = std::min(chunk, operation.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    if (team.rank() == operation.root) {
      copy(team.slot(), bytes + offset, step);
      team.publish(operation.pack());
    } else {
      team.publish(operation.pack());
      MUSTER_TRY(team.wait(operation.root, deadline));
      MUSTER_TRY(check_tag(team, operation.root, operation));
      copy(bytes + offset, team.slot(operation.root), step);
    }
    offset += step;
  } while (offset < operation.bytes());
  return {};
}

Result<> team_all_gather(Team& team, const Operation& operation, const void* input, void* output,
                         const Deadline& deadline) {
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes());
  const auto* in = static_cast<const uint8_t*>(input);
  auto* out = static_cast<uint8_t*>(output);
  size_t offset = 0;
  do {
    const size_t bytes = std::min(chunk, operation.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    copy(team.slot(), in + offset, bytes);
    MUSTER_TRY(meet(team, operation, deadline));
    for (Rank peer = 0; peer < team.size(); ++peer) {
      uint8_t* to = out + static_cast<size_t>(peer) * operation.bytes() + offset;
      const uint8_t* from = peer == team.rank() ? in + offset : team.slot(peer);
      if (to != from) copy(to, from, bytes);
    }
    offset += bytes;
  } while (offset < operation.bytes());
  return {};
}

Result<> team_barrier(Team& team, const Operation& operation, const Deadline& deadline) {
  MUSTER_TRY(team.begin(deadline));
  return meet(team, operation, deadline);
}

}  // namespace muster
