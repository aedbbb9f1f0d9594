#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/schedule_builder.h"

namespace muster {
namespace {

/// The neighbors of a position in a binary tree. The tree has positions 1 to `last` in order from left to right; odd
/// positions are its leaves. If the tree is not full, the subtree of a position beyond the end takes the place of this
/// position.
struct Neighbors {
  int parent = 0;  ///< 0: none
  int children[2] = {0, 0};
};

Neighbors in_order_tree(int position, int last) {
  Neighbors found;
  const int root = static_cast<int>(std::bit_floor(static_cast<unsigned>(last)));
  if (position != root) {
    int parent = position;
    do {
      const int bit = lowest_bit(parent);
      parent = (parent & 2 * bit) != 0 ? parent - bit : parent + bit;
    } while (parent > last);
    found.parent = parent;
  }
  const int half = lowest_bit(position) / 2;
  if (half == 0) return found;
  found.children[0] = position - half;
  int right = position + half;
  while (right > last && lowest_bit(right) > 1) right -= lowest_bit(right) / 2;
  if (right <= last) found.children[1] = right;
  return found;
}

/// One of the two trees over a row of `size` members, as member `self` (from 0) sees it. The second tree is shifted by
/// one, so that the inner members of one are leaves of the other.
struct Tree {
  Tree(int self, int size, bool shifted) {
    const auto member = [&](int position) { return shifted ? position % size : position - 1; };
    const Neighbors near = in_order_tree(shifted && self == 0 ? size : shifted ? self : self + 1, size);
    if (near.parent != 0) parent = member(near.parent);
    for (const int position : near.children) {
      if (position != 0) children.push_back(member(position));
    }
  }
  int parent = -1;  ///< -1: none
  std::vector<int> children;
};

/// One tree, and its half of the bytes in chunks.
struct Half {
  Tree tree;
  Chunks chunks;
};

std::vector<Half> halves(const CollectiveSpec& spec, int self, int members) {
  const size_t first = spec.count / 2 * spec.element_bytes, bytes = tensor_bytes(spec);
  const size_t grain = chunk_grain(spec);
  return {{Tree(self, members, false), {0, first, grain}}, {Tree(self, members, true), {first, bytes - first, grain}}};
}

class DoubleTreeAllReduce {
 public:
  explicit DoubleTreeAllReduce(const CollectiveSpec& spec) : spec_(spec), halves_(halves(spec, spec.rank, spec.size)) {
    for (const Half& half : halves_) {
      for (int child = 0; child < 2; ++child) {
        slots_.emplace_back(builder_, half.tree.children.empty() ? 0 : half.chunks.largest());
      }
      sums_.emplace_back(half.chunks.count(), Step::kNone);
    }
    left_ = sums_;
  }

  // A chunk goes down `lag` chunks after it went up. Both directions may share a link, and both ends must have the
  // steps of a link in the same order. The lag keeps a chunk from waiting there for another chunk whose sum is not
  // complete yet.
  Schedule build() {
    const auto lag = static_cast<uint32_t>(2 * doubling_rounds(spec_.size));
    const uint32_t chunks = halves_[1].chunks.count();  // the longer half
    for (uint32_t time = 0; time < chunks + lag; ++time) {
      for (int tree = 0; tree < 2; ++tree) {
        if (time < halves_[tree].chunks.count()) up(tree, time);
      }
      for (int tree = 0; tree < 2; ++tree) {
        if (time >= lag && time - lag < halves_[tree].chunks.count()) down(tree, time - lag);
      }
    }
    return builder_.take();
  }

 private:
  void up(int which, uint32_t chunk) {
    const auto& [tree, chunks] = halves_[which];
    Range current = chunks.at(BufferKind::kInput, chunk);
    const Range sum = chunks.at(BufferKind::kOutput, chunk);
    uint32_t& had = sums_[which][chunk];
    for (size_t child = 0; child < tree.children.size(); ++child) {
      had = slots_[2 * which + child].receive_reduce(builder_, tree.children[child], current, sum, had);
      current = sum;
    }
    if (tree.parent >= 0) left_[which][chunk] = builder_.send(tree.parent, current, {had});
  }

  void down(int which, uint32_t chunk) {
    const auto& [tree, chunks] = halves_[which];
    const Range here = chunks.at(BufferKind::kOutput, chunk);
    uint32_t had = sums_[which][chunk];
    if (tree.parent >= 0) had = builder_.receive(tree.parent, here, {left_[which][chunk]});
    for (const int child : tree.children) builder_.send(child, here, {had});
  }

  const CollectiveSpec& spec_;
  const std::vector<Half> halves_;
  ScheduleBuilder builder_;
  std::vector<Slots> slots_;                 // by tree and child
  std::vector<std::vector<uint32_t>> sums_;  // by tree and chunk: the step that completed the sum here
  std::vector<std::vector<uint32_t>> left_;  // by tree and chunk: the step that sent the sum up
};

}  // namespace

Schedule double_tree_all_reduce(const CollectiveSpec& spec) { return DoubleTreeAllReduce(spec).build(); }

// Both trees consist of the ranks other than the root. The root sends to the top of each tree.
Schedule double_tree_broadcast(const CollectiveSpec& spec) {
  const FromRoot ranks(spec);
  const int members = spec.size - 1;
  ScheduleBuilder builder;
  if (ranks.is_root()) builder.copy(input(0, tensor_bytes(spec)), output(0, tensor_bytes(spec)));
  const std::vector<Half> both = halves(spec, std::max(ranks.self - 1, 0), members);
  const int top = static_cast<int>(std::bit_floor(static_cast<unsigned>(members)));
  for (uint32_t chunk = 0; chunk < both[1].chunks.count(); ++chunk) {
    for (const auto& [tree, chunks] : both) {
      if (chunk >= chunks.count()) continue;
      const bool shifted = &tree == &both[1].tree;
      if (ranks.is_root()) {
        builder.send(ranks.rank(1 + (shifted ? top % members : top - 1)), chunks.at(BufferKind::kInput, chunk));
        continue;
      }
      const Rank parent = tree.parent < 0 ? spec.root : ranks.rank(tree.parent + 1);
      const uint32_t arrived = builder.receive(parent, chunks.at(BufferKind::kOutput, chunk));
      for (const int child : tree.children) {
        builder.send(ranks.rank(child + 1), chunks.at(BufferKind::kOutput, chunk), {arrived});
      }
    }
  }
  return builder.take();
}

}  // namespace muster
