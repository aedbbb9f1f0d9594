#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {

// Before the round of distance d, rank r has d blocks: its own and the following ones, which wrap around the end. It
// sends them (or only as many as are missing there) to r - d, and receives as many from r + d. A message that wraps
// around the end takes two steps.
Schedule bruck_all_gather(const CollectiveSpec& spec) {
  const Blocks blocks = Blocks::of_ranks(spec);
  ScheduleBuilder builder;
  uint32_t had = builder.copy(input(0, blocks.bytes(spec.rank)), blocks.range(BufferKind::kOutput, spec.rank));
  for (int distance = 1; distance < spec.size; distance *= 2) {
    const int count = std::min(distance, spec.size - distance);
    const Rank from = around(spec, distance), to = around(spec, -distance);
    blocks.each_range(BufferKind::kOutput, spec.rank, count, [&](Range range) { builder.send(to, range, {had}); });
    // Each receive depends on the one before, so a dependency on the last one covers all.
    blocks.each_range(BufferKind::kOutput, from, count,
                      [&](Range range) { had = last_of(had, builder.receive(from, range, {had})); });
  }
  return builder.take();
}

// Block i of `held` is for rank r + i. In the round of distance d, the blocks whose number has the bit d go to r + d,
// in one message. After all rounds, block i is the one from rank r - i.
Schedule bruck_all_to_all(const CollectiveSpec& spec) {
  const int size = spec.size;
  const size_t bytes = tensor_bytes(spec);
  ScheduleBuilder builder;
  const Range held = builder.scratch(size * bytes);
  // Calls `body` for each run of consecutive blocks that are sent in a round, with the bytes of the runs before it.
  // Returns the bytes of all runs.
  const auto each_run = [&](int distance, auto&& body) {
    size_t before = 0;
    for (int first = distance; first < size; first += 2 * distance) {
      const size_t run = std::min(distance, size - first) * bytes;
      body(part(held, first * bytes, run), before);
      before += run;
    }
    return before;
  };
  size_t most = 0;
  for (int distance = 1; distance < size; distance *= 2) {
    most = std::max(most, each_run(distance, [](Range, size_t) {}));
  }
  const Range packed = builder.scratch(most), arriving = builder.scratch(most);
  uint32_t done = Step::kNone;  // the last copy. Each copy depends on the one before, so a dependency on it covers all
  uint32_t sent = Step::kNone;  // the last send: `packed` is free when it has ended
  const auto copy = [&](Range from, Range to, uint32_t after) {
    done = last_of(done, builder.copy(from, to, {done, after}));
  };
  const size_t own = spec.rank * bytes, behind = size * bytes - own;
  copy(input(own, behind), part(held, 0, behind), Step::kNone);
  copy(input(0, own), part(held, behind, own), Step::kNone);
  for (int distance = 1; distance < size; distance *= 2) {
    const size_t all =
        each_run(distance, [&](Range run, size_t before) { copy(run, part(packed, before, run.bytes), sent); });
    sent = builder.send(around(spec, distance), part(packed, 0, all), {done});
    const uint32_t arrived = builder.receive(around(spec, -distance), part(arriving, 0, all), {done});
    each_run(distance, [&](Range run, size_t before) { copy(part(arriving, before, run.bytes), run, arrived); });
  }
  for (int i = 0; i < size; ++i) {
    builder.copy(part(held, i * bytes, bytes), output(around(spec, -i) * bytes, bytes), {done});
  }
  return builder.take();
}

}  // namespace muster
