#pragma once

#include <algorithm>
#include <bit>

#include "muster/base/check.h"
#include "muster/collective/schedule.h"

namespace muster {

/// What the next step waits for.
struct After {
  uint32_t one = Step::kNone;
  uint32_t other = Step::kNone;
};

/// Appends steps to a schedule. Each function returns the index of its step, for others to wait for.
class ScheduleBuilder {
 public:
  uint32_t send(Rank peer, Range from, After after = {}) {
    return add({.kind = Step::Kind::kSend, .peer = peer, .from = from}, after);
  }
  uint32_t receive(Rank peer, Range to, After after = {}) {
    return add({.kind = Step::Kind::kReceive, .peer = peer, .to = to}, after);
  }
  uint32_t receive_reduce(Rank peer, Range scratch, Range with, Range to, After after = {}) {
    return add(
        {.kind = Step::Kind::kReceiveReduce, .peer = peer, .from = scratch, .to = to, .with = with, .from_first = true},
        after);
  }
  uint32_t copy(Range from, Range to, After after = {}) {
    return add({.kind = Step::Kind::kCopy, .from = from, .to = to}, after);
  }
  uint32_t reduce(Range from, Range with, Range to, bool from_first, After after = {}) {
    return add({.kind = Step::Kind::kReduce, .from = from, .to = to, .with = with, .from_first = from_first}, after);
  }
  /// Reserves `bytes` of scratch.
  Range scratch(size_t bytes) {
    const Range range{Place::kScratch, schedule_.scratch_bytes, bytes};
    schedule_.scratch_bytes += bytes;
    return range;
  }
  Schedule take() { return std::move(schedule_); }

 private:
  uint32_t add(Step step, After after) {
    step.after = after.one;
    step.and_after = after.other;
    schedule_.steps.push_back(step);
    return static_cast<uint32_t>(schedule_.steps.size() - 1);
  }

  Schedule schedule_;
};

inline Range input(size_t offset, size_t bytes) { return {Place::kInput, offset, bytes}; }
inline Range output(size_t offset, size_t bytes) { return {Place::kOutput, offset, bytes}; }

/// A span of bytes cut into chunks of equal size, the last one shorter.
struct Chunks {
  size_t offset = 0;
  size_t bytes = 0;
  size_t grain = 1;

  uint32_t count() const { return static_cast<uint32_t>((bytes + grain - 1) / grain); }
  Range at(Place place, uint32_t index) const {
    const size_t start = index * grain;
    return {place, offset + start, std::min(grain, bytes - start)};
  }
};

/// Bytes of a chunk: whole elements, at least one.
inline size_t chunk_grain(const Problem& problem) {
  return std::max(problem.chunk_bytes / problem.element_bytes, size_t{1}) * problem.element_bytes;
}

/// `rank` plus `steps` around the ring; steps >= -size.
inline Rank around(const Problem& problem, int steps) { return (problem.rank + problem.size + steps) % problem.size; }

/// Rounds in which everybody is reached by doubling: ceil(log2 size).
inline int doubling_rounds(int size) { return std::bit_width(static_cast<unsigned>(size) - 1u); }

inline void check_problem(const Problem& problem) {
  MUSTER_CHECK(problem.size > 0 && problem.rank >= 0 && problem.rank < problem.size, "a rank lies in [0, size)");
  MUSTER_CHECK(problem.root >= 0 && problem.root < problem.size, "the root lies in [0, size)");
  MUSTER_CHECK(problem.element_bytes > 0, "elements have bytes");
}

}  // namespace muster
