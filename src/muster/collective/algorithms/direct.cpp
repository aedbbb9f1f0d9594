#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {

Schedule chain_broadcast(const CollectiveSpec& spec) {
  const FromRoot chain(spec);
  const bool root = chain.is_root(), last = chain.self == spec.size - 1;
  const Chunks chunks{0, tensor_bytes(spec), chunk_grain(spec)};
  ScheduleBuilder builder;
  for (uint32_t i = 0; i < chunks.count(); ++i) {
    const Range here = chunks.at(BufferKind::kOutput, i), source = root ? chunks.at(BufferKind::kInput, i) : here;
    const uint32_t arrived = root ? Step::kNone : builder.receive(around(spec, -1), here);
    if (!last) builder.send(around(spec, 1), source, {arrived});
    if (root) builder.copy(source, here);
  }
  return builder.take();
}

Schedule direct_scatter(const CollectiveSpec& spec) {
  const Blocks blocks = Blocks::of_ranks(spec);
  const Range own = output(0, blocks.bytes(spec.rank));
  ScheduleBuilder builder;
  if (spec.rank != spec.root) builder.receive(spec.root, own);
  for (int k = 1; k < spec.size && spec.rank == spec.root; ++k) {
    builder.send(around(spec, k), blocks.range(BufferKind::kInput, around(spec, k)));
  }
  if (spec.rank == spec.root) builder.copy(blocks.range(BufferKind::kInput, spec.rank), own);
  return builder.take();
}

Schedule direct_gather(const CollectiveSpec& spec) {
  const Blocks blocks = Blocks::of_ranks(spec);
  const Range own = input(0, blocks.bytes(spec.rank));
  ScheduleBuilder builder;
  if (spec.rank != spec.root) builder.send(spec.root, own);
  if (spec.rank == spec.root) builder.copy(own, blocks.range(BufferKind::kOutput, spec.rank));
  for (int k = 1; k < spec.size && spec.rank == spec.root; ++k) {
    builder.receive(around(spec, k), blocks.range(BufferKind::kOutput, around(spec, k)));
  }
  return builder.take();
}

// Step k sends to rank r + k and receives from rank r - k. It begins when step k - kAtOnce has ended, so that a large
// group does not begin with all ranks sending to all ranks.
Schedule pairwise_all_to_all(const CollectiveSpec& spec) {
  constexpr int kAtOnce = 8;
  const Blocks sent = Blocks::of_ranks(spec);
  const Blocks received = Blocks::of_ranks(spec, spec.receive_counts);
  ScheduleBuilder builder;
  std::vector<After> ended(spec.size);
  for (int k = 1; k < spec.size; ++k) {
    const Rank to = around(spec, k), from = around(spec, -k);
    const After before = k > kAtOnce ? ended[k - kAtOnce] : After{};
    ended[k].one = builder.send(to, sent.range(BufferKind::kInput, to), before);
    ended[k].other = builder.receive(from, received.range(BufferKind::kOutput, from), before);
  }
  builder.copy(sent.range(BufferKind::kInput, spec.rank), received.range(BufferKind::kOutput, spec.rank));
  return builder.take();
}

}  // namespace muster
