#include "muster/collective/team_collectives.h"

#include <fmt/format.h>

#include <algorithm>
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

/// Reduces `bytes` of all sources into the output from byte `offset` on.
void reduce_all(const Operation& operation, size_t offset, size_t bytes, std::vector<const void*>& sources) {
  const Call& call = operation.call;
  const int size = static_cast<int>(sources.size());
  operation.output.visit(offset, bytes, [&](uint8_t* out, size_t here) {
    const size_t count = here / size_of(call.dtype);
    reduce_many(out, sources.data(), size, count, call.dtype, call.op);
    if (call.op == ReduceOp::kAverage) divide_by(out, count, call.dtype, size);
    for (const void*& source : sources) source = static_cast<const uint8_t*>(source) + here;
  });
}

/// All ranks read all slots.
Result<> one_shot(Team& team, const Operation& operation, const Deadline& deadline) {
  const Call& call = operation.call;
  const size_t element = size_of(call.dtype);
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes()) / element * element;
  std::vector<const void*> sources(team.size());
  size_t offset = 0;
  do {
    const size_t bytes = std::min(chunk, call.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    operation.input.read(offset, team.slot(), bytes);
    MUSTER_TRY(meet(team, call, deadline));
    slots_at(team, 0, sources);
    reduce_all(operation, offset, bytes, sources);
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

/// Each rank reduces its part of a chunk, then reads the others' parts.
Result<> two_shot(Team& team, const Operation& operation, const Deadline& deadline) {
  const Call& call = operation.call;
  const size_t element = size_of(call.dtype);
  const size_t chunk = std::min(kTwoShotChunk, team.slot_bytes()) / element * element;
  std::vector<const void*> sources(team.size());
  for (size_t offset = 0; offset < call.bytes(); offset += chunk) {
    const size_t bytes = std::min(chunk, call.bytes() - offset);
    const size_t count = bytes / element;
    MUSTER_TRY(team.begin(deadline));
    operation.input.read(offset, team.slot(), bytes);
    MUSTER_TRY(meet(team, call, deadline));

    const size_t begin = part(team.rank(), team.size(), count, element);
    const size_t end = part(team.rank() + 1, team.size(), count, element);
    slots_at(team, begin * element, sources);  // of the first step; the result goes into the second step's slot
    MUSTER_TRY(team.begin(deadline));
    uint8_t* const reduced = team.slot() + begin * element;
    reduce_many(reduced, sources.data(), team.size(), end - begin, call.dtype, call.op);
    if (call.op == ReduceOp::kAverage) divide_by(reduced, end - begin, call.dtype, team.size());
    MUSTER_TRY(meet(team, call, deadline));

    for (Rank peer = 0; peer < team.size(); ++peer) {
      const size_t from = part(peer, team.size(), count, element) * element;
      const size_t to = part(peer + 1, team.size(), count, element) * element;
      operation.output.write(offset + from, team.slot(peer) + from, to - from);
    }
  }
  return {};
}

Result<> all_reduce(Team& team, const Operation& operation, const Deadline& deadline) {
  const bool few = team.size() <= kOneShotRanks || operation.call.bytes() <= kOneShotBytes;
  return few ? one_shot(team, operation, deadline) : two_shot(team, operation, deadline);
}

Result<> broadcast(Team& team, const Operation& operation, const Deadline& deadline) {
  const Call& call = operation.call;
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes());
  size_t offset = 0;
  do {
    const size_t step = std::min(chunk, call.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    if (team.rank() == call.root) {
      operation.input.read(offset, team.slot(), step);
      team.publish(call.pack());
    } else {
      team.publish(call.pack());
      MUSTER_TRY(team.wait(call.root, deadline));
      MUSTER_TRY(check_tag(team, call.root, call));
      operation.output.write(offset, team.slot(call.root), step);
    }
    offset += step;
  } while (offset < call.bytes());
  return {};
}

Result<> all_gather(Team& team, const Operation& operation, const Deadline& deadline) {
  const Call& call = operation.call;
  const size_t chunk = std::min(kOneShotChunk, team.slot_bytes());
  size_t offset = 0;
  do {
    const size_t bytes = std::min(chunk, call.bytes() - offset);
    MUSTER_TRY(team.begin(deadline));
    operation.input.read(offset, team.slot(), bytes);
    MUSTER_TRY(meet(team, call, deadline));
    for (Rank peer = 0; peer < team.size(); ++peer) {
      operation.output.write(static_cast<size_t>(peer) * call.bytes() + offset, team.slot(peer), bytes);
    }
    offset += bytes;
  } while (offset < call.bytes());
  return {};
}

Result<> barrier(Team& team, const Call& call, const Deadline& deadline) {
  MUSTER_TRY(team.begin(deadline));
  return meet(team, call, deadline);
}

}  // namespace

Result<> run_in_team(Team& team, const Operation& operation, const Deadline& deadline) {
  switch (operation.call.collective) {
    case Collective::kAllReduce:
      return all_reduce(team, operation, deadline);
    case Collective::kBroadcast:
      return broadcast(team, operation, deadline);
    case Collective::kAllGather:
      if (operation.counts.empty()) return all_gather(team, operation, deadline);
      break;
    case Collective::kBarrier:
      return barrier(team, operation.call, deadline);
    default:
      break;
  }
  return fail(ErrorCode::kUnsupported, fmt::format("{} has no form in shared memory", name(operation.call.collective)));
}

}  // namespace muster
