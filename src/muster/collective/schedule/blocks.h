#pragma once

#include <algorithm>
#include <vector>

#include "muster/collective/schedule/schedule_builder.h"

namespace muster {

/// Consecutive blocks of a buffer, in bytes.
class Blocks {
 public:
  /// The blocks of the ranks (operation.h): `counts` elements each, or equal blocks if it is empty.
  static Blocks of_ranks(const CollectiveSpec& spec, const std::vector<size_t>& counts) {
    Blocks blocks;
    for (Rank rank = 0; rank < spec.size; ++rank) {
      blocks.append((counts.empty() ? spec.count : counts[rank]) * spec.element_bytes);
    }
    return blocks;
  }
  static Blocks of_ranks(const CollectiveSpec& spec) { return of_ranks(spec, spec.counts); }

  /// One tensor, split into `parts` blocks whose lengths differ by one element at most.
  static Blocks shares(const CollectiveSpec& spec, int parts) {
    Blocks blocks;
    const size_t least = spec.count / parts, longer = spec.count % parts;
    for (size_t part = 0; part < static_cast<size_t>(parts); ++part) {
      blocks.append((least + (part < longer ? 1 : 0)) * spec.element_bytes);
    }
    return blocks;
  }

  void append(size_t bytes) { ends_.push_back(total() + bytes); }
  int count() const { return static_cast<int>(ends_.size()); }
  size_t total() const { return ends_.empty() ? 0 : ends_.back(); }
  size_t offset(int block) const { return block == 0 ? 0 : ends_[block - 1]; }
  size_t bytes(int block) const { return ends_[block] - offset(block); }
  size_t largest() const {
    size_t most = 0;
    for (int block = 0; block < count(); ++block) most = std::max(most, bytes(block));
    return most;
  }
  Range range(BufferKind buffer, int block) const { return {buffer, offset(block), bytes(block)}; }
  /// Blocks [first, last).
  Range range(BufferKind buffer, int first, int last) const {
    return {buffer, offset(first), offset(last) - offset(first)};
  }
  /// Calls `body` with the ranges of `count` blocks from `first` on: one range, or two if they wrap around the end.
  template <class Body>
  void each_range(BufferKind buffer, int first, int count, Body&& body) const {
    const int before_end = std::min(count, this->count() - first);
    body(range(buffer, first, first + before_end));
    if (before_end < count) body(range(buffer, 0, count - before_end));
  }
  Chunks chunks(int block, size_t grain) const { return {offset(block), bytes(block), grain}; }

 private:
  std::vector<size_t> ends_;
};

}  // namespace muster
