// In the tree of block b, rank b + p has position p. Its parent has position p without its lowest set bit. Every rank
// has each position once, in the tree of another block. All ranks process the positions in the same order. This order
// is depth first, so that a rank has at most log2 n incomplete partial sums at the same time.
#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {
namespace {

/// The partial sum of a rank for the positions with the same lowest bit. These positions use it one after the other.
struct Sum {
  Range range;
  uint32_t combined = Step::kNone;  ///< the last step that added to it; kNone if no step has
  uint32_t left = Step::kNone;      ///< the send of the previous sum
};

class PatReduceScatter {
 public:
  explicit PatReduceScatter(const CollectiveSpec& spec)
      : spec_(spec),
        blocks_(Blocks::of_ranks(spec)),
        grain_(chunk_grain(spec)),
        slots_(builder_, std::min(grain_, blocks_.largest())),
        sums_(doubling_rounds(spec.size)) {
    // Positions with the lowest bit 1 are leaves, which need no sum. The sum of the root is in the output.
    for (size_t level = 1; level < sums_.size(); ++level) {
      sums_[level].range = builder_.scratch(std::min(grain_, blocks_.largest()));
    }
  }

  Schedule build() {
    const auto chunks = static_cast<uint32_t>((blocks_.largest() + grain_ - 1) / grain_);
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      root_ = Step::kNone;
      for (int position = spec_.size - 1; position > 0; --position) {
        send(position, chunk);
        take(position, chunk);
      }
    }
    return builder_.take();
  }

 private:
  /// This rank's operand at a position; empty if the block has no such chunk.
  Range operand(int position, uint32_t chunk) const {
    const Chunks chunks = blocks_.chunks(around(spec_, -position), grain_);
    return chunk < chunks.count() ? chunks.at(BufferKind::kInput, chunk) : Range{BufferKind::kInput, 0, 0};
  }
  Sum& sum_of(int position) { return sums_[std::countr_zero(static_cast<unsigned>(position))]; }

  void send(int position, uint32_t chunk) {
    const Range own = operand(position, chunk);
    const Rank parent = around(spec_, -lowest_bit(position));
    Sum& sum = sum_of(position);
    if (sum.combined == Step::kNone) {
      builder_.send(parent, own);
    } else {
      sum.left = builder_.send(parent, part(sum.range, 0, own.bytes), {sum.combined});
      sum.combined = Step::kNone;
    }
  }

  /// Receives the sum of position `child`, which its rank sends now, and adds it to the sum of the parent position.
  void take(int child, uint32_t chunk) {
    const int position = child - lowest_bit(child);
    const Rank from = around(spec_, lowest_bit(child));
    const Range own = operand(position, chunk);
    if (position == 0) {
      const Range result = output(chunk * grain_, own.bytes);
      root_ = slots_.receive_reduce(builder_, from, root_ == Step::kNone ? own : result, result, root_);
      return;
    }
    Sum& sum = sum_of(position);
    const Range to = part(sum.range, 0, own.bytes);
    const bool first = sum.combined == Step::kNone;
    sum.combined = slots_.receive_reduce(builder_, from, first ? own : to, to, first ? sum.left : sum.combined);
  }

  const CollectiveSpec& spec_;
  const Blocks blocks_;
  const size_t grain_;
  ScheduleBuilder builder_;
  Slots slots_;
  std::vector<Sum> sums_;
  uint32_t root_ = Step::kNone;
};

}  // namespace

Schedule pat_reduce_scatter(const CollectiveSpec& spec) {
  check_spec(spec);
  return spec.size == 1 ? copy_input(Blocks::of_ranks(spec).total()) : PatReduceScatter(spec).build();
}

Schedule pat_all_gather(const CollectiveSpec& spec) {
  check_spec(spec);
  const Blocks blocks = Blocks::of_ranks(spec);
  const size_t grain = chunk_grain(spec);
  const auto chunks = static_cast<uint32_t>((blocks.largest() + grain - 1) / grain);
  const auto block = [&](int position) { return blocks.chunks(around(spec, -position), grain); };
  ScheduleBuilder builder;
  builder.copy(input(0, blocks.bytes(spec.rank)), blocks.range(BufferKind::kOutput, spec.rank));
  std::vector<uint32_t> arrived(spec.size, Step::kNone);
  for (uint32_t i = 0; i < chunks; ++i) {
    for (int position = 1; position < spec.size; ++position) {
      const int parent = position - lowest_bit(position);
      const Chunks own{0, blocks.bytes(spec.rank), grain};
      const Chunks out = parent == 0 ? own : block(parent), in = block(position);
      if (i < out.count()) {
        builder.send(around(spec, lowest_bit(position)),
                     out.at(parent == 0 ? BufferKind::kInput : BufferKind::kOutput, i), {arrived[parent]});
      }
      if (i < in.count()) {
        arrived[position] = builder.receive(around(spec, -lowest_bit(position)), in.at(BufferKind::kOutput, i));
      }
    }
  }
  return builder.take();
}

}  // namespace muster
