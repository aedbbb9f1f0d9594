// In the tree of block b, rank b + o has the place o: its parent has the place without o's lowest set bit. Every rank
// has each place once, in the tree of another block, and all ranks go through the places in the same order. That order
// is depth first, so that no more than log2 n partial sums of a rank are incomplete at the same time.
#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {
namespace {

/// What a rank sums up for the places of one lowest bit, one after the other.
struct Sum {
  Range range;
  uint32_t combined = Step::kNone;  ///< the last step that added to it; kNone: nothing arrived yet
  uint32_t left = Step::kNone;      ///< the send of the sum before
};

class PatReduceScatter {
 public:
  explicit PatReduceScatter(const CollectiveSpec& problem)
      : problem_(problem),
        blocks_(Blocks::of_ranks(problem)),
        grain_(chunk_grain(problem)),
        slots_(builder_, std::min(grain_, blocks_.largest())),
        sums_(doubling_rounds(problem.size)) {
    // Places with the lowest bit 1 are leaves. The last one is the root's, in the output.
    for (size_t level = 1; level < sums_.size(); ++level) {
      sums_[level].range = builder_.scratch(std::min(grain_, blocks_.largest()));
    }
  }

  Schedule build() {
    const auto chunks = static_cast<uint32_t>((blocks_.largest() + grain_ - 1) / grain_);
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      root_ = Step::kNone;
      for (int place = problem_.size - 1; place > 0; --place) {
        send(place, chunk);
        take(place, chunk);
      }
    }
    return builder_.take();
  }

 private:
  /// This rank's operand at a place, and nothing where the block has no such chunk.
  Range operand(int place, uint32_t chunk) const {
    const Chunks chunks = blocks_.chunks(around(problem_, -place), grain_);
    return chunk < chunks.count() ? chunks.at(BufferKind::kInput, chunk) : Range{BufferKind::kInput, 0, 0};
  }
  Sum& sum_of(int place) { return sums_[std::countr_zero(static_cast<unsigned>(place))]; }

  void send(int place, uint32_t chunk) {
    const Range own = operand(place, chunk);
    const Rank parent = around(problem_, -lowest_bit(place));
    Sum& sum = sum_of(place);
    if (sum.combined == Step::kNone) {
      builder_.send(parent, own);
    } else {
      sum.left = builder_.send(parent, part(sum.range, 0, own.bytes), {sum.combined});
      sum.combined = Step::kNone;
    }
  }

  /// What the child at `child`, which sends now, adds to its parent's place.
  void take(int child, uint32_t chunk) {
    const int place = child - lowest_bit(child);
    const Rank from = around(problem_, lowest_bit(child));
    const Range own = operand(place, chunk);
    if (place == 0) {
      const Range result = output(chunk * grain_, own.bytes);
      root_ = slots_.receive_reduce(builder_, from, root_ == Step::kNone ? own : result, result, root_);
      return;
    }
    Sum& sum = sum_of(place);
    const Range to = part(sum.range, 0, own.bytes);
    const bool first = sum.combined == Step::kNone;
    sum.combined = slots_.receive_reduce(builder_, from, first ? own : to, to, first ? sum.left : sum.combined);
  }

  const CollectiveSpec& problem_;
  const Blocks blocks_;
  const size_t grain_;
  ScheduleBuilder builder_;
  Slots slots_;
  std::vector<Sum> sums_;
  uint32_t root_ = Step::kNone;
};

}  // namespace

Schedule pat_reduce_scatter(const CollectiveSpec& problem) {
  check_problem(problem);
  return problem.size == 1 ? copy_input(Blocks::of_ranks(problem).total()) : PatReduceScatter(problem).build();
}

Schedule pat_all_gather(const CollectiveSpec& problem) {
  check_problem(problem);
  const Blocks blocks = Blocks::of_ranks(problem);
  const size_t grain = chunk_grain(problem);
  const auto chunks = static_cast<uint32_t>((blocks.largest() + grain - 1) / grain);
  const auto block = [&](int place) { return blocks.chunks(around(problem, -place), grain); };
  ScheduleBuilder builder;
  builder.copy(input(0, blocks.bytes(problem.rank)), blocks.range(BufferKind::kOutput, problem.rank));
  std::vector<uint32_t> arrived(problem.size, Step::kNone);
  for (uint32_t i = 0; i < chunks; ++i) {
    for (int place = 1; place < problem.size; ++place) {
      const int parent = place - lowest_bit(place);
      const Chunks own{0, blocks.bytes(problem.rank), grain};
      const Chunks out = parent == 0 ? own : block(parent), in = block(place);
      if (i < out.count()) {
        builder.send(around(problem, lowest_bit(place)),
                     out.at(parent == 0 ? BufferKind::kInput : BufferKind::kOutput, i), {arrived[parent]});
      }
      if (i < in.count()) {
        arrived[place] = builder.receive(around(problem, -lowest_bit(place)), in.at(BufferKind::kOutput, i));
      }
    }
  }
  return builder.take();
}

}  // namespace muster
