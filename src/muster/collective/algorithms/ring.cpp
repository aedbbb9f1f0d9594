#include <optional>

#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {
namespace {

/// The two passes around the ring. In step k of the first pass, rank r sends its partial sum of share r - k and
/// combines share r - k - 1. At the end of this pass, rank r has the complete share r + 1. The second pass carries the
/// complete shares around the ring.
class RingAllReduce {
 public:
  explicit RingAllReduce(const CollectiveSpec& spec)
      : spec_(spec),
        shares_(Blocks::shares(spec, spec.size)),
        grain_(chunk_grain(spec)),
        slots_(builder_, shares_.chunks(0, grain_).largest()),
        sent_(spec.size),
        arrived_(spec.size) {}

  Schedule build() {
    for (int k = 0; k < spec_.size - 1; ++k) {
      send(around(spec_, -k), k == 0 ? BufferKind::kInput : BufferKind::kOutput);
      combine(around(spec_, -k - 1));
    }
    for (int k = 0; k < spec_.size - 1; ++k) {
      send(around(spec_, 1 - k), BufferKind::kOutput);
      receive(around(spec_, -k));
    }
    return builder_.take();
  }

 private:
  // Sends each chunk of a share as soon as it has arrived.
  void send(Rank share, BufferKind buffer) {
    const Chunks chunks = shares_.chunks(share, grain_);
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      const uint32_t had = arrived_[share].empty() ? Step::kNone : arrived_[share][i];
      sent_[share].push_back(builder_.send(around(spec_, 1), chunks.at(buffer, i), {had}));
    }
  }

  void combine(Rank share) {
    const Chunks chunks = shares_.chunks(share, grain_);
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      arrived_[share].push_back(slots_.receive_reduce(builder_, around(spec_, -1), chunks.at(BufferKind::kInput, i),
                                                      chunks.at(BufferKind::kOutput, i)));
    }
  }

  // Overwrites the partial sum of the first pass, so it depends on the send of that sum.
  void receive(Rank share) {
    const Chunks chunks = shares_.chunks(share, grain_);
    arrived_[share].clear();
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      arrived_[share].push_back(
          builder_.receive(around(spec_, -1), chunks.at(BufferKind::kOutput, i), {sent_[share][i]}));
    }
  }

  const CollectiveSpec& spec_;
  Blocks shares_;
  size_t grain_;
  ScheduleBuilder builder_;
  Slots slots_;
  std::vector<std::vector<uint32_t>> sent_, arrived_;  // by share and chunk: the step
};

/// Panels, which are some chunks of every block, go around the ring one after the other, so that partial sums need
/// little scratch. In step k of a panel, rank r sends its partial sum of block r - k - 1 and combines block r - k - 2.
/// The last of these blocks is its own.
class RingReduceScatter {
 public:
  /// The sum of the own block is written to `result`.
  RingReduceScatter(const CollectiveSpec& spec, Blocks blocks, ScheduleBuilder& builder, Range result)
      : spec_(spec),
        blocks_(std::move(blocks)),
        builder_(builder),
        result_(result),
        grain_(chunk_grain(spec)),
        last_use_(spec.size, Step::kNone) {
    const size_t chunk = std::min(grain_, blocks_.largest());
    const auto chunks = static_cast<uint32_t>((blocks_.largest() + grain_ - 1) / grain_);
    const bool passes_on = spec.size > 2;
    for (uint32_t i = 0; passes_on && i < 2 * std::min(chunks, kPanel); ++i) {
      slots_.push_back({builder.scratch(chunk), Step::kNone});
    }
    while (panel_ < chunks) {
      for (int k = 0; k < spec.size - 1; ++k) step(k);
      panel_ += kPanel;
    }
  }
  /// The last step that uses a block of the input. For the own block, the step that completes the result.
  uint32_t last_use(Rank block) const { return last_use_[block]; }

 private:
  static constexpr uint32_t kPanel = 4;  // chunks of a block in flight at the same time
  struct Slot {
    Range range;
    uint32_t last_use;  // the send of its sum, which must end before the slot is reused
  };

  // The partial sums of one step are in one half of the slots, while those of the next step arrive in the other half.
  Slot& slot(int k, uint32_t chunk) { return slots_[(k % 2) * (slots_.size() / 2) + chunk - panel_]; }

  void step(int k) {
    const Rank next = around(spec_, 1), previous = around(spec_, -1);
    const Rank out = (spec_.rank + 2 * spec_.size - k - 1) % spec_.size;
    const Rank in = (out + spec_.size - 1) % spec_.size;
    const Chunks sent = blocks_.chunks(out, grain_), received = blocks_.chunks(in, grain_);
    for (uint32_t i = panel_; i < std::min(sent.count(), panel_ + kPanel); ++i) {
      if (k == 0) {
        last_use_[out] = builder_.send(next, sent.at(BufferKind::kInput, i));
      } else {
        Slot& from = slot(k - 1, i);
        from.last_use =
            builder_.send(next, part(from.range, 0, sent.at(BufferKind::kInput, i).bytes), {arrived_[i - panel_]});
      }
    }
    for (uint32_t i = panel_; i < std::min(received.count(), panel_ + kPanel); ++i) {
      const Range here = received.at(BufferKind::kInput, i);
      if (k == spec_.size - 2) {
        arrived_[i - panel_] = final(previous, here, part(result_, i * grain_, here.bytes));
      } else {
        const Slot& to = slot(k, i);
        const Range sum = part(to.range, 0, here.bytes);
        arrived_[i - panel_] = builder_.receive_reduce(previous, sum, here, sum, {to.last_use});
      }
      last_use_[in] = arrived_[i - panel_];
    }
  }

  uint32_t final(Rank previous, Range here, Range to) {
    if (!arrivals_) arrivals_.emplace(builder_, std::min(grain_, blocks_.bytes(spec_.rank)));
    return arrivals_->receive_reduce(builder_, previous, here, to);
  }

  const CollectiveSpec& spec_;
  const Blocks blocks_;
  ScheduleBuilder& builder_;
  const Range result_;
  const size_t grain_;
  std::vector<Slot> slots_;
  std::optional<Slots> arrivals_;
  std::vector<uint32_t> last_use_;
  uint32_t arrived_[kPanel] = {};  // by chunk of the panel: the step that combined it last
  uint32_t panel_ = 0;
};

}  // namespace

Schedule ring_all_reduce(const CollectiveSpec& spec) {
  check_spec(spec);
  return spec.size == 1 ? copy_input(tensor_bytes(spec)) : RingAllReduce(spec).build();
}

Schedule ring_reduce_scatter(const CollectiveSpec& spec) {
  check_spec(spec);
  Blocks blocks = Blocks::of_ranks(spec);
  const Range result = output(0, blocks.bytes(spec.rank));
  if (spec.size == 1) return copy_input(result.bytes);
  ScheduleBuilder builder;
  RingReduceScatter(spec, std::move(blocks), builder, result);
  return builder.take();
}

// The root receives the shares that the other ranks completed into its output, which may be its input. So each of these
// receives depends on the last use of that input.
Schedule ring_reduce(const CollectiveSpec& spec) {
  check_spec(spec);
  if (spec.size == 1) return copy_input(tensor_bytes(spec));
  const Blocks shares = Blocks::shares(spec, spec.size);
  const bool root = spec.rank == spec.root;
  ScheduleBuilder builder;
  const Range own = root ? shares.range(BufferKind::kOutput, spec.rank) : builder.scratch(shares.bytes(spec.rank));
  const RingReduceScatter pass(spec, shares, builder, own);
  if (!root) builder.send(spec.root, own, {pass.last_use(spec.rank)});
  for (Rank rank = 0; root && rank < spec.size; ++rank) {
    if (rank != spec.root) builder.receive(rank, shares.range(BufferKind::kOutput, rank), {pass.last_use(rank)});
  }
  return builder.take();
}

Schedule ring_all_gather(const CollectiveSpec& spec) {
  check_spec(spec);
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
