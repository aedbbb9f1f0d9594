#pragma once

#include <algorithm>
#include <bit>
#include <utility>

#include "muster/collective/schedule/schedule.h"

namespace muster {

/// The dependencies of a new step.
struct After {
  uint32_t one = Step::kNone;
  uint32_t other = Step::kNone;
};

/// Appends steps to a schedule. Each function returns the index of its step, for the dependencies of later steps. A
/// step without bytes is left out; then the index is kNone.
class ScheduleBuilder {
 public:
  uint32_t send(Rank peer, Range from, After after = {}) {
    return add({.kind = Step::Kind::kSend, .peer = peer, .from = from}, from.bytes, after);
  }
  uint32_t receive(Rank peer, Range to, After after = {}) {
    return add({.kind = Step::Kind::kReceive, .peer = peer, .to = to}, to.bytes, after);
  }
  uint32_t receive_reduce(Rank peer, Range scratch, Range with, Range to, After after = {}) {
    return add(
        {.kind = Step::Kind::kReceiveReduce, .peer = peer, .from = scratch, .to = to, .with = with, .from_first = true},
        to.bytes, after);
  }
  uint32_t copy(Range from, Range to, After after = {}) {
    return add({.kind = Step::Kind::kCopy, .from = from, .to = to}, to.bytes, after);
  }
  uint32_t reduce(Range from, Range with, Range to, bool from_first, After after = {}) {
    return add({.kind = Step::Kind::kReduce, .from = from, .to = to, .with = with, .from_first = from_first}, to.bytes,
               after);
  }
  /// Reserves `bytes` of scratch.
  Range scratch(size_t bytes) {
    const Range range{BufferKind::kScratch, schedule_.scratch_bytes, bytes};
    schedule_.scratch_bytes += bytes;
    return range;
  }
  Schedule take() { return std::move(schedule_); }

 private:
  uint32_t add(Step step, size_t bytes, After after) {
    if (bytes == 0) return Step::kNone;
    step.after = after.one;
    step.and_after = after.other;
    schedule_.steps.push_back(step);
    return static_cast<uint32_t>(schedule_.steps.size() - 1);
  }

  Schedule schedule_;
};

/// The last of two steps. The second one depends on the first one, or was left out.
inline uint32_t last_of(uint32_t first, uint32_t second) { return second == Step::kNone ? first : second; }

inline Range input(size_t offset, size_t bytes) { return {BufferKind::kInput, offset, bytes}; }
inline Range output(size_t offset, size_t bytes) { return {BufferKind::kOutput, offset, bytes}; }
inline Range part(const Range& whole, size_t offset, size_t bytes) {
  return {whole.buffer, whole.offset + offset, bytes};
}

/// A span of bytes, split into chunks of equal size. The last chunk may be shorter.
struct Chunks {
  size_t offset = 0;
  size_t bytes = 0;
  size_t grain = 1;

  uint32_t count() const { return static_cast<uint32_t>((bytes + grain - 1) / grain); }
  size_t largest() const { return std::min(bytes, grain); }
  Range at(BufferKind buffer, uint32_t index) const {
    const size_t start = index * grain;
    return {buffer, offset + start, std::min(grain, bytes - start)};
  }
};

/// Scratch for received operands: two slots that are used in turn. A slot is free when the last step that used it has
/// ended.
class Slots {
 public:
  Slots(ScheduleBuilder& builder, size_t bytes) {
    for (Range& slot : slots_) slot = builder.scratch(bytes);
  }
  /// Receives from `peer` and combines with `with` into `to`.
  uint32_t receive_reduce(ScheduleBuilder& builder, Rank peer, Range with, Range to, uint32_t after = Step::kNone) {
    if (to.bytes == 0) return Step::kNone;
    const uint32_t slot = used_++ % 2;
    last_use_[slot] = builder.receive_reduce(peer, part(slots_[slot], 0, to.bytes), with, to, {after, last_use_[slot]});
    return last_use_[slot];
  }

 private:
  Range slots_[2];
  uint32_t last_use_[2] = {Step::kNone, Step::kNone};
  uint32_t used_ = 0;
};

/// Bytes of a chunk: whole elements, at least one.
inline size_t chunk_grain(const CollectiveSpec& spec) {
  return std::max(spec.chunk_bytes / spec.element_bytes, size_t{1}) * spec.element_bytes;
}
inline size_t tensor_bytes(const CollectiveSpec& spec) { return spec.count * spec.element_bytes; }

/// The rank that is `steps` ranks further around the ring; steps >= -size.
inline Rank around(const CollectiveSpec& spec, int steps) { return (spec.rank + spec.size + steps) % spec.size; }

/// The largest power of two that divides `position`.
inline int lowest_bit(int position) { return position & -position; }

/// Rounds of doubling until all ranks are reached: ceil(log2 size).
inline int doubling_rounds(int size) { return std::bit_width(static_cast<unsigned>(size) - 1u); }

/// Ranks relative to the root, which is 0.
struct FromRoot {
  explicit FromRoot(const CollectiveSpec& spec)
      : root(spec.root), size(spec.size), self((spec.rank - spec.root + spec.size) % spec.size) {}
  Rank rank(int relative) const { return (relative + root) % size; }
  bool is_root() const { return self == 0; }
  Rank root;
  int size;
  int self;
};

}  // namespace muster
