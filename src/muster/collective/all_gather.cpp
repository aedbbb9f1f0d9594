#include "muster/collective/schedule_builder.h"

namespace muster {
namespace {

constexpr size_t kBruckLimit = 256 << 10;  // bytes of the whole result

size_t block_bytes(const Problem& problem) { return problem.count * problem.element_bytes; }

}  // namespace

Schedule ring_all_gather(const Problem& problem) {
  check_problem(problem);
  const size_t bytes = block_bytes(problem);
  const auto block = [&](Rank rank) { return Chunks{rank * bytes, bytes, chunk_grain(problem)}; };
  ScheduleBuilder builder;
  if (bytes > 0) builder.copy(input(0, bytes), output(problem.rank * bytes, bytes));
  std::vector<uint32_t> arrived;
  for (int k = 0; k < problem.size - 1; ++k) {
    const Chunks out = k == 0 ? Chunks{0, bytes, chunk_grain(problem)} : block(around(problem, -k));
    for (uint32_t i = 0; i < out.count(); ++i) {
      builder.send(around(problem, 1), out.at(k == 0 ? Place::kInput : Place::kOutput, i),
                   {k == 0 ? Step::kNone : arrived[i]});
    }
    arrived.clear();
    const Chunks in = block(around(problem, -k - 1));
    for (uint32_t i = 0; i < in.count(); ++i) {
      arrived.push_back(builder.receive(around(problem, -1), in.at(Place::kOutput, i)));
    }
  }
  return builder.take();
}

// Before the round of distance d, rank r has the d blocks from its own on, around the end. It sends them (or as many as
// are missing there) to r - d and receives as many from r + d. A message that wraps around the end is two steps.
Schedule bruck_all_gather(const Problem& problem) {
  check_problem(problem);
  const size_t bytes = block_bytes(problem);
  ScheduleBuilder builder;
  if (bytes == 0) return builder.take();
  uint32_t had = builder.copy(input(0, bytes), output(problem.rank * bytes, bytes));
  const auto parts = [&](Rank first, int blocks, auto&& step) {
    const int before_end = std::min(blocks, problem.size - first);
    step(output(first * bytes, before_end * bytes));
    if (blocks > before_end) step(output(0, (blocks - before_end) * bytes));
  };
  for (int distance = 1; distance < problem.size; distance *= 2) {
    const int blocks = std::min(distance, problem.size - distance);
    const Rank from = around(problem, distance), to = around(problem, -distance);
    parts(problem.rank, blocks, [&](Range range) { builder.send(to, range, {had}); });
    // Each receive waits for the one before, so that the last one stands for all.
    parts(from, blocks, [&](Range range) { had = builder.receive(from, range, {had}); });
  }
  return builder.take();
}

Schedule choose_all_gather(const Problem& problem) {
  check_problem(problem);
  return block_bytes(problem) <= kBruckLimit / problem.size ? bruck_all_gather(problem) : ring_all_gather(problem);
}

}  // namespace muster
