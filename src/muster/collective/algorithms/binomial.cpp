// Binomial trees. Ranks are counted from the root. A rank's parent is its number without its lowest set bit. Its
// children are its number plus each lower power of two. So the subtree of a rank consists of the ranks that follow it.
#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {
namespace {

struct BinomialTree : FromRoot {
  explicit BinomialTree(const CollectiveSpec& spec)
      : FromRoot(spec), reach(is_root() ? 1 << doubling_rounds(size) : lowest_bit(self)) {}

  Rank parent() const { return rank(self - reach); }
  /// One past the last rank of this rank's subtree.
  int end() const { return std::min(self + reach, size); }

  /// Calls `body(child, end)` for each child with the end of its subtree, the nearest child first or last.
  template <class Body>
  void each_child(bool nearest_first, Body&& body) const {
    for (int i = 1; i < reach; i *= 2) {
      const int distance = nearest_first ? i : reach / (2 * i);
      if (self + distance < end()) body(self + distance, std::min(self + 2 * distance, end()));
    }
  }

  int reach;  ///< size of the subtree, unless it reaches the last rank
};

/// The ranks' blocks in the order of the tree.
Blocks in_order(const BinomialTree& tree, const Blocks& by_rank) {
  Blocks blocks;
  for (int relative = 0; relative < by_rank.count(); ++relative) blocks.append(by_rank.bytes(tree.rank(relative)));
  return blocks;
}

}  // namespace

Schedule binomial_broadcast(const CollectiveSpec& spec) {
  const BinomialTree tree(spec);
  const BufferKind source = tree.is_root() ? BufferKind::kInput : BufferKind::kOutput;
  const Chunks chunks{0, tensor_bytes(spec), chunk_grain(spec)};
  ScheduleBuilder builder;
  for (uint32_t i = 0; i < chunks.count(); ++i) {
    uint32_t arrived = Step::kNone;
    if (!tree.is_root()) arrived = builder.receive(tree.parent(), chunks.at(BufferKind::kOutput, i));
    tree.each_child(false, [&](int child, int) { builder.send(tree.rank(child), chunks.at(source, i), {arrived}); });
    if (tree.is_root()) builder.copy(chunks.at(BufferKind::kInput, i), chunks.at(BufferKind::kOutput, i));
  }
  return builder.take();
}

// Ranks other than the root keep their sums in scratch for some chunks. They reuse the scratch of a chunk when its sum
// was sent.
Schedule binomial_reduce(const CollectiveSpec& spec) {
  constexpr uint32_t kSums = 4;
  const BinomialTree tree(spec);
  const Chunks chunks{0, tensor_bytes(spec), chunk_grain(spec)};
  const bool leaf = tree.end() == tree.self + 1;
  ScheduleBuilder builder;
  Slots slots(builder, leaf ? 0 : chunks.largest());
  Range sums[kSums];
  uint32_t left[kSums];
  std::fill_n(left, kSums, Step::kNone);
  for (uint32_t i = 0; !leaf && !tree.is_root() && i < std::min(kSums, chunks.count()); ++i) {
    sums[i] = builder.scratch(chunks.largest());
  }
  for (uint32_t i = 0; i < chunks.count(); ++i) {
    Range current = chunks.at(BufferKind::kInput, i);
    const Range sum = tree.is_root() ? chunks.at(BufferKind::kOutput, i) : part(sums[i % kSums], 0, current.bytes);
    uint32_t had = left[i % kSums];
    tree.each_child(true, [&](int child, int) {
      had = slots.receive_reduce(builder, tree.rank(child), current, sum, had);
      current = sum;
    });
    if (!tree.is_root()) {
      left[i % kSums] = builder.send(tree.parent(), current, {leaf ? Step::kNone : had});
    } else if (leaf) {
      builder.copy(current, sum);
    }
  }
  return builder.take();
}

Schedule binomial_scatter(const CollectiveSpec& spec) {
  const BinomialTree tree(spec);
  const Blocks by_rank = Blocks::of_ranks(spec), blocks = in_order(tree, by_rank);
  ScheduleBuilder builder;
  const Range own = output(0, by_rank.bytes(spec.rank));
  if (tree.is_root()) {
    tree.each_child(false, [&](int child, int end) {
      by_rank.each_range(BufferKind::kInput, tree.rank(child), end - child,
                         [&](Range piece) { builder.send(tree.rank(child), piece); });
    });
    builder.copy(by_rank.range(BufferKind::kInput, spec.rank), own);
    return builder.take();
  }
  const Range below = blocks.range(BufferKind::kScratch, tree.self + 1, tree.end());
  const Range passed_on = builder.scratch(below.bytes);
  builder.receive(tree.parent(), own);
  const uint32_t arrived = builder.receive(tree.parent(), passed_on);
  tree.each_child(false, [&](int child, int end) {
    const Range piece = blocks.range(BufferKind::kScratch, child, end);
    builder.send(tree.rank(child), part(passed_on, piece.offset - below.offset, piece.bytes), {arrived});
  });
  return builder.take();
}

Schedule binomial_gather(const CollectiveSpec& spec) {
  const BinomialTree tree(spec);
  const Blocks by_rank = Blocks::of_ranks(spec), blocks = in_order(tree, by_rank);
  const Range own = input(0, by_rank.bytes(spec.rank));
  ScheduleBuilder builder;
  if (tree.is_root()) {
    builder.copy(own, by_rank.range(BufferKind::kOutput, spec.rank));
    tree.each_child(true, [&](int child, int end) {
      by_rank.each_range(BufferKind::kOutput, tree.rank(child), end - child,
                         [&](Range piece) { builder.receive(tree.rank(child), piece); });
    });
    return builder.take();
  }
  builder.send(tree.parent(), own);
  tree.each_child(true, [&](int child, int end) {
    const Range piece = builder.scratch(blocks.range(BufferKind::kScratch, child, end).bytes);
    builder.send(tree.parent(), piece, {builder.receive(tree.rank(child), piece)});
  });
  return builder.take();
}

}  // namespace muster
