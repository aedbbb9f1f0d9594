#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {

// Before the round of distance d, rank r has d blocks: its own and the following ones, which wrap around the end. It
// sends them (or only as many as are missing there) to r - d, and receives as many from r + d. A message that wraps
// around the end takes two steps.
Schedule bruck_all_gather(const CollectiveSpec& spec) {
  check_spec(spec);
  const Blocks blocks = Blocks::of_ranks(spec);
  ScheduleBuilder builder;
  uint32_t had = builder.copy(input(0, blocks.bytes(spec.rank)), blocks.range(BufferKind::kOutput, spec.rank));
  const auto parts = [&](Rank first, int count, auto&& step) {
    const int before_end = std::min(count, spec.size - first);
    step(blocks.range(BufferKind::kOutput, first, first + before_end));
    if (count > before_end) step(blocks.range(BufferKind::kOutput, 0, count - before_end));
  };
  for (int distance = 1; distance < spec.size; distance *= 2) {
    const int count = std::min(distance, spec.size - distance);
    const Rank from = around(spec, distance), to = around(spec, -distance);
    parts(spec.rank, count, [&](Range range) { builder.send(to, range, {had}); });
    // Each receive depends on the one before, so a dependency on the last one covers all.
    parts(from, count, [&](Range range) { had = last_of(had, builder.receive(from, range, {had})); });
  }
  return builder.take();
}

namespace {

/// Block i of `held_` is for rank r + i. In the round of distance d, the blocks whose number has the bit d go to r + d,
/// in one message. After all rounds, block i is the one from rank r - i.
class AllToAll {
 public:
  explicit AllToAll(const CollectiveSpec& spec)
      : spec_(spec), size_(spec.size), bytes_(tensor_bytes(spec)), held_(builder_.scratch(size_ * bytes_)) {
    size_t most = 0;
    for (size_t distance = 1; distance < size_; distance *= 2) most = std::max(most, travelling(distance));
    packed_ = builder_.scratch(most * bytes_);
    arriving_ = builder_.scratch(most * bytes_);
  }

  Schedule build() {
    const size_t own = spec_.rank * bytes_, behind = size_ * bytes_ - own;
    done_ = builder_.copy(input(own, behind), part(held_, 0, behind));
    done_ = last_of(done_, builder_.copy(input(0, own), part(held_, behind, own), {done_}));
    for (size_t distance = 1; distance < size_; distance *= 2) round(distance);
    for (size_t i = 0; i < size_; ++i) {
      const Rank from = around(spec_, -static_cast<int>(i));
      builder_.copy(part(held_, i * bytes_, bytes_), output(from * bytes_, bytes_), {done_});
    }
    return builder_.take();
  }

 private:
  /// Calls `body` for each run of consecutive blocks that are sent in this round, with the bytes of the runs before it.
  template <class Body>
  void each_run(size_t distance, Body&& body) const {
    size_t before = 0;
    for (size_t first = distance; first < size_; first += 2 * distance) {
      const size_t run = std::min(distance, size_ - first);
      body(part(held_, first * bytes_, run * bytes_), before * bytes_);
      before += run;
    }
  }
  size_t travelling(size_t distance) const {
    size_t blocks = 0;
    each_run(distance, [&](Range run, size_t) { blocks += bytes_ == 0 ? 0 : run.bytes / bytes_; });
    return blocks;
  }

  // Each copy depends on the one before, so a dependency on the last one covers all.
  void round(size_t distance) {
    const Rank to = around(spec_, static_cast<int>(distance)), from = around(spec_, -static_cast<int>(distance));
    const size_t bytes = travelling(distance) * bytes_;
    each_run(distance, [&](Range run, size_t before) {
      done_ = last_of(done_, builder_.copy(run, part(packed_, before, run.bytes), {done_, sent_}));
    });
    sent_ = builder_.send(to, part(packed_, 0, bytes), {done_});
    const uint32_t arrived = builder_.receive(from, part(arriving_, 0, bytes), {done_});
    each_run(distance, [&](Range run, size_t before) {
      done_ = last_of(done_, builder_.copy(part(arriving_, before, run.bytes), run, {done_, arrived}));
    });
  }

  const CollectiveSpec& spec_;
  const size_t size_, bytes_;
  ScheduleBuilder builder_;
  Range held_, packed_, arriving_;
  uint32_t done_ = Step::kNone;  // the last copy
  uint32_t sent_ = Step::kNone;  // the last send: packed_ is free when it has ended
};

}  // namespace

Schedule bruck_all_to_all(const CollectiveSpec& spec) {
  check_spec(spec);
  MUSTER_CHECK(spec.counts.empty(), "the blocks of Bruck's all_to_all are equal");
  return AllToAll(spec).build();
}

}  // namespace muster
