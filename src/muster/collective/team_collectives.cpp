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

Result<> check_tag(Team& team, Rank peer, const Call& mine) {
  if (team.tag(peer) == mine.pack()) return {};
  return fail(ErrorCode::kMismatch,
              fmt::format("rank {} called {} where rank {} called {}; all ranks must make the same calls in the same "
                          "order",
                          peer, Call::unpack(team.tag(peer)).to_string(), team.rank(), mine.to_string()),
              peer);
}

/// Ends a step that every rank takes part in: publish, wait for all, compare.
Result<> meet(Team& team, const Call& call, const Deadline& deadline) {
  team.publish(call.pack());
  MUSTER_TRY(team.wait_all(deadline));
  for (Rank peer = 0; peer < team.size(); ++peer) {
    if (peer != team.rank()) MUSTER_TRY(check_tag(team, peer, call));
  }
  return {};
}

/// The slots of this step from byte `offset` on, in rank order.
void slots_at(Team& team, size_t offset, std::vector<const void*>& out) {
  for (Rank peer = 0; peer < team.size(); ++peer) out[peer] = team.slot(peer) + offset;
}

void reduce_all(const Call& call, void* out, const std::vector<const void*>& sources, size_t count) {
  const int size = static_cast<int>(sources.size());
  reduce_many(out, sources.data(), size, count, call.dtype, call.op);
  if (call.op == ReduceOp::kAverage) divide_by(out, count, call.dtype, size);
}

Result<> one_shot(Team& team, const Call& call, uint8_t* data, const Deadline& deadline) {
  const size_t element = size_of(call.dtype);
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes()) / element * element;
  std::vector<const void*> sources(team.size());
  size_t offset = 0;
  do {
    const size_t bytes = std::min(chunk, call.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    copy(team.slot(), data + offset, bytes);
    MUSTER_TRY(meet(team, call, deadline));
    slots_at(team, 0, sources);
    reduce_all(call, data + offset, sources, bytes / element);
    offset += bytes;
  } while (offset < call.bytes());
  return {};
}

/// Elements [part(r), part(r + 1)) of a chunk belong to rank r; bounds fall on cache lines.
size_t part(Rank rank, int size, size_t count, size_t element) {
  const size_t line = std::max<size_t>(1, 64 / element);
  const size_t lines = (count + line - 1) / line;
  return std::min(count, lines * rank / size * line);
}

Result<> two_shot(Team& team, const Call& call, uint8_t* data, const Deadline& deadline) {
  const size_t element = size_of(call.dtype);
  const size_t chunk = std::min(kTwoShotChunk, team.slot_bytes()) / element * element;
  std::vector<const void*> sources(team.size());
  for (size_t offset = 0; offset < call.bytes(); offset += chunk) {
    const size_t bytes = std::min(chunk, call.bytes() - offset);
    const size_t count = bytes / element;
    MUSTER_TRY(team.begin(deadline));
    copy(team.slot(), data + offset, bytes);
    MUSTER_TRY(meet(team, call, deadline));

    const size_t begin = part(team.rank(), team.size(), count, element);
    const size_t end = part(team.rank() + 1, team.size(), count, element);
    slots_at(team, begin * element, sources);  // of the first step; the result goes into the second step's slot
    MUSTER_TRY(team.begin(deadline));
    reduce_all(call, team.slot() + begin * element, sources, end - begin);
    MUSTER_TRY(meet(team, call, deadline));

    for (Rank peer = 0; peer < team.size(); ++peer) {
      const size_t from = part(peer, team.size(), count, element) * element;
      const size_t to = part(peer + 1, team.size(), count, element) * element;
      copy(data + offset + from, team.slot(peer) + from, to - from);
    }
  }
  return {};
}

}  // namespace

Result<> team_all_reduce(Team& team, const Call& call, void* data, const Deadline& deadline) {
  auto* bytes = static_cast<uint8_t*>(data);
  const bool few = team.size() <= kOneShotRanks || call.bytes() <= kOneShotBytes;
  return few ? one_shot(team, call, bytes, deadline) : two_shot(team, call, bytes, deadline);
}

Result<> team_broadcast(Team& team, const Call& call, void* data, const Deadline& deadline) {
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes());
  auto* bytes = static_cast<uint8_t*>(data);
  size_t offset = 0;
  do {
    const size_t step = std::min(chunk, call.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    if (team.rank() == call.root) {
      copy(team.slot(), bytes + offset, step);
      team.publish(call.pack());
    } else {
      team.publish(call.pack());
      MUSTER_TRY(team.wait(call.root, deadline));
      MUSTER_TRY(check_tag(team, call.root, call));
      copy(bytes + offset, team.slot(call.root), step);
    }
    offset += step;
  } while (offset < call.bytes());
  return {};
}

Result<> team_all_gather(Team& team, const Call& call, const void* input, void* output, const Deadline& deadline) {
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes());
  const auto* in = static_cast<const uint8_t*>(input);
  auto* out = static_cast<uint8_t*>(output);
  size_t offset = 0;
  do {
    const size_t bytes = std::min(chunk, call.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    copy(team.slot(), in + offset, bytes);
    MUSTER_TRY(meet(team, call, deadline));
    for (Rank peer = 0; peer < team.size(); ++peer) {
      uint8_t* to = out + static_cast<size_t>(peer) * call.bytes() + offset;
      const uint8_t* from = peer == team.rank() ? in + offset : team.slot(peer);
      if (to != from) copy(to, from, bytes);
    }
    offset += bytes;
  } while (offset < call.bytes());
  return {};
}

Result<> team_barrier(Team& team, const Call& call, const Deadline& deadline) {
  MUSTER_TRY(team.begin(deadline));
  return meet(team, call, deadline);
}

}  // namespace muster
