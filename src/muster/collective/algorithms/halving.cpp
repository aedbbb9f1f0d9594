#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"
#include "muster/collective/schedule/folding.h"

namespace muster {
namespace {

/// Recursive halving: in each round, a rank sends the half of its data that its partner's side of the core completes,
/// and combines its own half. `sums` holds the partial sums; it is as long as the whole buffer.
class Halving {
 public:
  Halving(const CollectiveSpec& spec, const Folding& fold, const Blocks& blocks, ScheduleBuilder& builder, Range sums)
      : fold_(fold),
        blocks_(blocks),
        builder_(builder),
        sums_(sums),
        grain_(chunk_grain(spec)),
        slots_(builder, std::min(grain_, blocks.total())) {}

  /// Adds the steps of a core rank: it combines the data of the rank that folds away, and then halves down to its own
  /// block.
  void run() {
    if (fold_.paired()) combine(fold_.partner(), 0, fold_.core());
    int first = 0, last = fold_.core();
    for (int distance = fold_.core() / 2; distance > 0; distance /= 2) {
      const int middle = first + distance;
      const bool lower = fold_.self() < middle;
      const Range away = current(lower ? middle : first, lower ? last : middle);
      sent_.push_back(builder_.send(fold_.across(distance), away, {combined_}));
      (lower ? last : first) = middle;
      combine(fold_.across(distance), first, last);
    }
  }
  /// The step that completed the own block.
  uint32_t combined() const { return combined_; }
  /// The sends of the rounds, in order.
  const std::vector<uint32_t>& sent() const { return sent_; }

 private:
  Range current(int first, int last) const {
    Range range = blocks_.range(buffer_, first, last);
    if (buffer_ == sums_.buffer) range.offset += sums_.offset;
    return range;
  }

  // Receives over one link end in order, so a dependency on the last one covers all.
  void combine(Rank partner, int first, int last) {
    const Range from = current(first, last);
    const Chunks chunks{0, from.bytes, grain_};
    const uint32_t before = combined_;
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      const Range chunk = chunks.at(from.buffer, i);
      combined_ = slots_.receive_reduce(builder_, partner, part(from, chunk.offset, chunk.bytes),
                                        part(sums_, blocks_.offset(first) + chunk.offset, chunk.bytes), before);
    }
    buffer_ = sums_.buffer;
  }

  const Folding& fold_;
  const Blocks& blocks_;
  ScheduleBuilder& builder_;
  const Range sums_;
  const size_t grain_;
  Slots slots_;
  BufferKind buffer_ = BufferKind::kInput;
  uint32_t combined_ = Step::kNone;
  std::vector<uint32_t> sent_;
};

/// All-gather by recursive doubling: the rounds of the halving in reverse order.
void gather(const Folding& fold, const Blocks& shares, ScheduleBuilder& builder, const Halving& halving) {
  uint32_t had = halving.combined();
  int first = fold.self(), last = first + 1, round = static_cast<int>(halving.sent().size());
  for (int distance = 1; distance < fold.core(); distance *= 2) {
    const Rank partner = fold.across(distance);
    builder.send(partner, shares.range(BufferKind::kOutput, first, last), {had});
    const bool lower = (fold.self() & distance) == 0;
    const Range missing =
        shares.range(BufferKind::kOutput, lower ? last : first - distance, lower ? last + distance : first);
    // The halving round of this distance sent this range, so the receive depends on that send.
    had = last_of(had, builder.receive(partner, missing, {halving.sent()[--round], had}));
    (lower ? last : first) += lower ? distance : -distance;
  }
  if (fold.paired()) builder.send(fold.partner(), output(0, shares.total()), {had});
}

}  // namespace

Schedule halving_all_reduce(const CollectiveSpec& spec) {
  const size_t bytes = tensor_bytes(spec);
  const Folding fold(spec);
  if (fold.folds_away()) return fold.schedule_away(input(0, bytes), output(0, bytes));
  const Blocks shares = Blocks::shares(spec, fold.core());
  ScheduleBuilder builder;
  Halving halving(spec, fold, shares, builder, output(0, bytes));
  halving.run();
  gather(fold, shares, builder, halving);
  return builder.take();
}

// A core rank of a pair completes the blocks of both ranks of the pair.
Schedule halving_reduce_scatter(const CollectiveSpec& spec) {
  const Blocks ranks = Blocks::of_ranks(spec);
  const Range own = output(0, ranks.bytes(spec.rank));
  const Folding fold(spec);
  if (fold.folds_away()) return fold.schedule_away(input(0, ranks.total()), own);
  Blocks blocks;
  for (int core = 0; core < fold.core(); ++core) {
    blocks.append(ranks.range(BufferKind::kInput, fold.first_of(core), fold.first_of(core + 1)).bytes);
  }
  ScheduleBuilder builder;
  const Range sums = builder.scratch(ranks.total());
  Halving halving(spec, fold, blocks, builder, sums);
  halving.run();
  const auto sum = [&](Rank rank) { return part(sums, ranks.offset(rank), ranks.bytes(rank)); };
  if (fold.paired()) builder.send(fold.partner(), sum(fold.partner()), {halving.combined()});
  // The output may be the own block of the input, but the last round has already used that block.
  builder.copy(sum(spec.rank), own, {halving.combined()});
  return builder.take();
}

}  // namespace muster
