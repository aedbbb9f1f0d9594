// Binomial trees. Ranks are counted from the root. A rank's parent is its number without its lowest set bit. Its
// children are its number plus each lower power of two. So the subtree of a rank consists of the ranks that follow it.
#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {
namespace {

class BinomialTree {
 public:
  explicit BinomialTree(const CollectiveSpec& spec)
      : from_root_(spec),
        self_(from_root_.self),
        reach_(self_ == 0 ? 1 << doubling_rounds(spec.size) : lowest_bit(self_)) {}

  bool root() const { return self_ == 0; }
  int self() const { return self_; }
  Rank parent() const { return rank(self_ - reach_); }
  Rank rank(int relative) const { return from_root_.rank(relative); }
  /// One past the last rank of this rank's subtree.
  int end() const { return std::min(self_ + reach_, from_root_.size); }

  /// Calls `body(child, end)` for each child with the end of its subtree, the nearest child first or last.
  template <class Body>
  void each_child(bool nearest_first, Body&& body) const {
    for (int i = 1; i < reach_; i *= 2) {
      const int distance = nearest_first ? i : reach_ / (2 * i);
      if (self_ + distance < end()) body(self_ + distance, std::min(self_ + 2 * distance, end()));
    }
  }

 private:
  FromRoot from_root_;
  int self_;
  int reach_;  ///< size of the subtree, unless it reaches the last rank
};

/// The ranks' blocks in the order of the tree.
Blocks in_order(const BinomialTree& tree, const Blocks& by_rank) {
  Blocks blocks;
  for (int relative = 0; relative < by_rank.count(); ++relative) blocks.append(by_rank.bytes(tree.rank(relative)));
  return blocks;
}

/// Calls `body` with the ranges of blocks [first, last) of the tree's order. In the buffer, blocks are in rank order,
/// so these are one range, or two if they wrap around the end.
template <class Body>
void each_piece(const BinomialTree& tree, const Blocks& by_rank, BufferKind buffer, int first, int last, Body&& body) {
  const Rank begin = tree.rank(first);
  const int before_end = std::min(last - first, by_rank.count() - begin);
  body(by_rank.range(buffer, begin, begin + before_end));
  if (before_end < last - first) body(by_rank.range(buffer, 0, last - first - before_end));
}

}  // namespace

Schedule binomial_broadcast(const CollectiveSpec& spec) {
  check_spec(spec);
  const BinomialTree tree(spec);
  const BufferKind source = tree.root() ? BufferKind::kInput : BufferKind::kOutput;
  const Chunks chunks{0, tensor_bytes(spec), chunk_grain(spec)};
  ScheduleBuilder builder;
  for (uint32_t i = 0; i < chunks.count(); ++i) {
    uint32_t arrived = Step::kNone;
    if (!tree.root()) arrived = builder.receive(tree.parent(), chunks.at(BufferKind::kOutput, i));
    tree.each_child(false, [&](int child, int) { builder.send(tree.rank(child), chunks.at(source, i), {arrived}); });
    if (tree.root()) builder.copy(chunks.at(BufferKind::kInput, i), chunks.at(BufferKind::kOutput, i));
  }
  return builder.take();
}

// Ranks other than the root keep their sums in scratch for some chunks. They reuse the scratch of a chunk when its sum
// was sent.
Schedule binomial_reduce(const CollectiveSpec& spec) {
  check_spec(spec);
  constexpr uint32_t kSums = 4;
  const BinomialTree tree(spec);
  const Chunks chunks{0, tensor_bytes(spec), chunk_grain(spec)};
  const bool leaf = tree.end() == tree.self() + 1;
  ScheduleBuilder builder;
  Slots slots(builder, leaf ? 0 : chunks.largest());
  Range sums[kSums];
  uint32_t left[kSums];
  std::fill_n(left, kSums, Step::kNone);
  for (uint32_t i = 0; !leaf && !tree.root() && i < std::min(kSums, chunks.count()); ++i) {
    sums[i] = builder.scratch(chunks.largest());
  }
  for (uint32_t i = 0; i < chunks.count(); ++i) {
    Range current = chunks.at(BufferKind::kInput, i);
    const Range sum = tree.root() ? chunks.at(BufferKind::kOutput, i) : part(sums[i % kSums], 0, current.bytes);
    uint32_t had = left[i % kSums];
    tree.each_child(true, [&](int child, int) {
      had = slots.receive_reduce(builder, tree.rank(child), current, sum, had);
      current = sum;
    });
    if (!tree.root()) {
      left[i % kSums] = builder.send(tree.parent(), current, {leaf ? Step::kNone : had});
    } else if (leaf) {
      builder.copy(current, sum);
    }
  }
  return builder.take();
}

Schedule binomial_scatter(const CollectiveSpec& spec) {
  check_spec(spec);
  const BinomialTree tree(spec);
  const Blocks by_rank = Blocks::of_ranks(spec), blocks = in_order(tree, by_rank);
  ScheduleBuilder builder;
  const Range own = output(0, by_rank.bytes(spec.rank));
  if (tree.root()) {
    tree.each_child(false, [&](int child, int end) {
      each_piece(tree, by_rank, BufferKind::kInput, child, end,
                 [&](Range piece) { builder.send(tree.rank(child), piece); });
    });
    builder.copy(by_rank.range(BufferKind::kInput, spec.rank), own);
    return builder.take();
  }
  const size_t begin = blocks.offset(tree.self() + 1 < blocks.count() ? tree.self() + 1 : tree.self());
  const size_t below =
      tree.end() == tree.self() + 1 ? 0 : blocks.offset(tree.end() - 1) + blocks.bytes(tree.end() - 1) - begin;
  const Range passed_on = builder.scratch(below);
  builder.receive(tree.parent(), own);
  const uint32_t arrived = builder.receive(tree.parent(), passed_on);
  tree.each_child(false, [&](int child, int end) {
    const Range piece = blocks.range(BufferKind::kScratch, child, end);
    builder.send(tree.rank(child), part(passed_on, piece.offset - begin, piece.bytes), {arrived});
  });
  return builder.take();
}

Schedule binomial_gather(const CollectiveSpec& spec) {
  check_spec(spec);
  const BinomialTree tree(spec);
  const Blocks by_rank = Blocks::of_ranks(spec), blocks = in_order(tree, by_rank);
  const Range own = input(0, by_rank.bytes(spec.rank));
  ScheduleBuilder builder;
  if (tree.root()) {
    builder.copy(own, by_rank.range(BufferKind::kOutput, spec.rank));
    tree.each_child(true, [&](int child, int end) {
      each_piece(tree, by_rank, BufferKind::kOutput, child, end,
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
