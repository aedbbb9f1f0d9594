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

}  // namespace

Schedule pat_reduce_scatter(const CollectiveSpec& spec) {
  const Blocks blocks = Blocks::of_ranks(spec);
  const size_t grain = chunk_grain(spec);
  const Chunks longest{0, blocks.largest(), grain};
  ScheduleBuilder builder;
  Slots slots(builder, longest.largest());
  // Positions with the lowest bit 1 are leaves, which need no sum. The sum of the root is in the output.
  std::vector<Sum> sums(doubling_rounds(spec.size));
  for (size_t level = 1; level < sums.size(); ++level) sums[level].range = builder.scratch(longest.largest());
  const auto sum_of = [&](int position) -> Sum& { return sums[std::countr_zero(static_cast<unsigned>(position))]; };
  // This rank's operand at a position; empty if the block has no such chunk.
  const auto operand = [&](int position, uint32_t chunk) {
    const Chunks chunks = blocks.chunks(around(spec, -position), grain);
    return chunk < chunks.count() ? chunks.at(BufferKind::kInput, chunk) : input(0, 0);
  };
  const auto send = [&](int position, uint32_t chunk) {
    const Range own = operand(position, chunk);
    const Rank parent = around(spec, -lowest_bit(position));
    Sum& sum = sum_of(position);
    if (sum.combined == Step::kNone) {
      builder.send(parent, own);
    } else {
      sum.left = builder.send(parent, part(sum.range, 0, own.bytes), {sum.combined});
      sum.combined = Step::kNone;
    }
  };
  for (uint32_t chunk = 0; chunk < longest.count(); ++chunk) {
    uint32_t root = Step::kNone;  // the last step that added to the sum of the root
    for (int child = spec.size - 1; child > 0; --child) {
      send(child, chunk);
      // Receives the sum of this position, which its rank sends now, and adds it to the sum of the parent position.
      const int position = child - lowest_bit(child);
      const Rank from = around(spec, lowest_bit(child));
      const Range own = operand(position, chunk);
      if (position == 0) {
        const Range result = output(chunk * grain, own.bytes);
        root = slots.receive_reduce(builder, from, root == Step::kNone ? own : result, result, root);
        continue;
      }
      Sum& sum = sum_of(position);
      const Range to = part(sum.range, 0, own.bytes);
      const bool first = sum.combined == Step::kNone;
      sum.combined = slots.receive_reduce(builder, from, first ? own : to, to, first ? sum.left : sum.combined);
    }
  }
  return builder.take();
}

Schedule pat_all_gather(const CollectiveSpec& spec) {
  const Blocks blocks = Blocks::of_ranks(spec);
  const size_t grain = chunk_grain(spec);
  const uint32_t chunks = Chunks{0, blocks.largest(), grain}.count();
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
