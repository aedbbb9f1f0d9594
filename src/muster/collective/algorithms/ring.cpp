#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {
namespace {

/// The slot of a partial sum.
struct RingSlot {
  Range range;
  uint32_t last_use = Step::kNone;  ///< the send of its sum, which must end before the slot is reused
};

/// Panels, which are some chunks of every block, go around the ring one after the other, so that partial sums need
/// little scratch. In step k of a panel, rank r sends its partial sum of block r - k - 1 and combines block r - k - 2.
/// The last of these blocks is its own, and the sum of this block is written to `result`. Returns for each block the
/// last step that uses the block of the input. For the own block, this step completes the result.
std::vector<uint32_t> reduce_scatter_panels(const CollectiveSpec& spec, const Blocks& blocks, ScheduleBuilder& builder,
                                            Range result) {
  constexpr uint32_t kPanel = 4;  // chunks of a block in flight at the same time
  const Rank next = around(spec, 1), previous = around(spec, -1);
  const size_t grain = chunk_grain(spec);
  const Chunks longest{0, blocks.largest(), grain};
  // The partial sums of one step are in one half of the slots, while those of the next step arrive in the other half.
  const uint32_t half = spec.size > 2 ? std::min(longest.count(), kPanel) : 0;
  std::vector<RingSlot> slots(2 * half);
  for (RingSlot& slot : slots) slot.range = builder.scratch(longest.largest());
  Slots arrivals(builder, std::min(grain, blocks.bytes(spec.rank)));
  std::vector<uint32_t> last_use(spec.size, Step::kNone);
  uint32_t arrived[kPanel] = {};  // by chunk of the panel: the step that combined it last
  const auto step = [&](int k, uint32_t panel) {
    const Rank out = around(spec, -k - 1), in = around(spec, -k - 2);
    const Chunks sent = blocks.chunks(out, grain), received = blocks.chunks(in, grain);
    for (uint32_t i = panel; i < std::min(sent.count(), panel + kPanel); ++i) {
      const Range own = sent.at(BufferKind::kInput, i);
      if (k == 0) {
        last_use[out] = builder.send(next, own);
      } else {
        RingSlot& from = slots[(k - 1) % 2 * half + i - panel];
        from.last_use = builder.send(next, part(from.range, 0, own.bytes), {arrived[i - panel]});
      }
    }
    for (uint32_t i = panel; i < std::min(received.count(), panel + kPanel); ++i) {
      const Range own = received.at(BufferKind::kInput, i);
      if (k == spec.size - 2) {
        last_use[in] = arrivals.receive_reduce(builder, previous, own, part(result, i * grain, own.bytes));
      } else {
        const RingSlot& to = slots[k % 2 * half + i - panel];
        const Range sum = part(to.range, 0, own.bytes);
        last_use[in] = builder.receive_reduce(previous, sum, own, sum, {to.last_use});
      }
      arrived[i - panel] = last_use[in];
    }
  };
  for (uint32_t panel = 0; panel < longest.count(); panel += kPanel) {
    for (int k = 0; k < spec.size - 1; ++k) step(k, panel);
  }
  return last_use;
}

}  // namespace

// Two passes around the ring. In step k of the first pass, rank r sends its partial sum of share r - k and combines
// share r - k - 1. At the end of this pass, rank r has the complete share r + 1. The second pass carries the complete
// shares around the ring.
Schedule ring_all_reduce(const CollectiveSpec& spec) {
  const Blocks shares = Blocks::shares(spec, spec.size);
  const size_t grain = chunk_grain(spec);
  const Rank next = around(spec, 1), previous = around(spec, -1);
  ScheduleBuilder builder;
  Slots slots(builder, shares.chunks(0, grain).largest());
  std::vector<std::vector<uint32_t>> sent(spec.size), arrived(spec.size);  // by share and chunk: the step
  // Sends each chunk of a share as soon as it has arrived.
  const auto send = [&](Rank share, BufferKind buffer) {
    const Chunks chunks = shares.chunks(share, grain);
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      const uint32_t had = arrived[share].empty() ? Step::kNone : arrived[share][i];
      sent[share].push_back(builder.send(next, chunks.at(buffer, i), {had}));
    }
  };
  for (int k = 0; k < spec.size - 1; ++k) {
    send(around(spec, -k), k == 0 ? BufferKind::kInput : BufferKind::kOutput);
    const Rank share = around(spec, -k - 1);
    const Chunks chunks = shares.chunks(share, grain);
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      const Range own = chunks.at(BufferKind::kInput, i), sum = chunks.at(BufferKind::kOutput, i);
      arrived[share].push_back(slots.receive_reduce(builder, previous, own, sum));
    }
  }
  for (int k = 0; k < spec.size - 1; ++k) {
    send(around(spec, 1 - k), BufferKind::kOutput);
    const Rank share = around(spec, -k);
    const Chunks chunks = shares.chunks(share, grain);
    arrived[share].clear();
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      // Overwrites the partial sum of the first pass, so it depends on the send of that sum.
      arrived[share].push_back(builder.receive(previous, chunks.at(BufferKind::kOutput, i), {sent[share][i]}));
    }
  }
  return builder.take();
}

Schedule ring_reduce_scatter(const CollectiveSpec& spec) {
  const Blocks blocks = Blocks::of_ranks(spec);
  ScheduleBuilder builder;
  reduce_scatter_panels(spec, blocks, builder, output(0, blocks.bytes(spec.rank)));
  return builder.take();
}

// The root receives the shares that the other ranks completed into its output, which may be its input. So each of these
// receives depends on the last use of that input.
Schedule ring_reduce(const CollectiveSpec& spec) {
  const Blocks shares = Blocks::shares(spec, spec.size);
  const bool root = spec.rank == spec.root;
  ScheduleBuilder builder;
  const Range own = root ? shares.range(BufferKind::kOutput, spec.rank) : builder.scratch(shares.bytes(spec.rank));
  const std::vector<uint32_t> last_use = reduce_scatter_panels(spec, shares, builder, own);
  if (!root) builder.send(spec.root, own, {last_use[spec.rank]});
  for (Rank rank = 0; root && rank < spec.size; ++rank) {
    if (rank != spec.root) builder.receive(rank, shares.range(BufferKind::kOutput, rank), {last_use[rank]});
  }
  return builder.take();
}

Schedule ring_all_gather(const CollectiveSpec& spec) {
  const Blocks blocks = Blocks::of_ranks(spec);
  const size_t grain = chunk_grain(spec);
  ScheduleBuilder builder;
  builder.copy(input(0, blocks.bytes(spec.rank)), blocks.range(BufferKind::kOutput, spec.rank));
  std::vector<uint32_t> arrived;
  for (int k = 0; k < spec.size - 1; ++k) {
    const Chunks own{0, blocks.bytes(spec.rank), grain};
    const Chunks out = k == 0 ? own : blocks.chunks(around(spec, -k), grain);
    for (uint32_t i = 0; i < out.count(); ++i) {
      builder.send(around(spec, 1), out.at(k == 0 ? BufferKind::kInput : BufferKind::kOutput, i),
                   {k == 0 ? Step::kNone : arrived[i]});
    }
    arrived.clear();
    const Chunks in = blocks.chunks(around(spec, -k - 1), grain);
    for (uint32_t i = 0; i < in.count(); ++i) {
      arrived.push_back(builder.receive(around(spec, -1), in.at(BufferKind::kOutput, i)));
    }
  }
  return builder.take();
}

}  // namespace muster
