#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {

Schedule chain_broadcast(const CollectiveSpec& problem) {
  check_problem(problem);
  const FromRoot chain(problem);
  const bool root = chain.self == 0, last = chain.self == problem.size - 1;
  const Chunks chunks{0, tensor_bytes(problem), chunk_grain(problem)};
  ScheduleBuilder builder;
  for (uint32_t i = 0; i < chunks.count(); ++i) {
    const Range here = chunks.at(BufferKind::kOutput, i), source = root ? chunks.at(BufferKind::kInput, i) : here;
    const uint32_t arrived = root ? Step::kNone : builder.receive(around(problem, -1), here);
    if (!last) builder.send(around(problem, 1), source, {arrived});
    if (root) builder.copy(source, here);
  }
  return builder.take();
}

Schedule direct_scatter(const CollectiveSpec& problem) {
  check_problem(problem);
  const Blocks blocks = Blocks::of_ranks(problem);
  const Range own = output(0, blocks.bytes(problem.rank));
  ScheduleBuilder builder;
  if (problem.rank != problem.root) {
    builder.receive(problem.root, own);
    return builder.take();
  }
  for (int k = 1; k < problem.size; ++k) {
    builder.send(around(problem, k), blocks.range(BufferKind::kInput, around(problem, k)));
  }
  builder.copy(blocks.range(BufferKind::kInput, problem.rank), own);
  return builder.take();
}

Schedule direct_gather(const CollectiveSpec& problem) {
  check_problem(problem);
  const Blocks blocks = Blocks::of_ranks(problem);
  const Range own = input(0, blocks.bytes(problem.rank));
  ScheduleBuilder builder;
  if (problem.rank != problem.root) {
    builder.send(problem.root, own);
    return builder.take();
  }
  builder.copy(own, blocks.range(BufferKind::kOutput, problem.rank));
  for (int k = 1; k < problem.size; ++k) {
    builder.receive(around(problem, k), blocks.range(BufferKind::kOutput, around(problem, k)));
  }
  return builder.take();
}

// In step k with the ranks k before and behind. A step begins when one some steps earlier has ended, so that a large
// group does not begin with everybody sending to everybody.
Schedule pairwise_all_to_all(const CollectiveSpec& problem) {
  check_problem(problem);
  constexpr int kAtOnce = 8;
  const Blocks sent = Blocks::of_ranks(problem);
  const Blocks received = Blocks::of_ranks(problem, problem.receive_counts);
  ScheduleBuilder builder;
  std::vector<After> ended(problem.size);
  for (int k = 1; k < problem.size; ++k) {
    const Rank to = around(problem, k), from = around(problem, -k);
    const After before = k > kAtOnce ? ended[k - kAtOnce] : After{};
    ended[k].one = builder.send(to, sent.range(BufferKind::kInput, to), before);
    ended[k].other = builder.receive(from, received.range(BufferKind::kOutput, from), before);
  }
  builder.copy(sent.range(BufferKind::kInput, problem.rank), received.range(BufferKind::kOutput, problem.rank));
  return builder.take();
}

}  // namespace muster
