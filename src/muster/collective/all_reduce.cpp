#include <cmath>

#include "muster/collective/schedule_builder.h"

namespace muster {
namespace {

/// The ring's cut of the buffer: one segment per rank, equal but for one element.
class Segments {
 public:
  explicit Segments(const Problem& problem)
      : problem_(problem),
        least_(problem.count / problem.size),
        longer_(problem.count % problem.size),
        grain_(chunk_grain(problem)) {}

  Chunks of(Rank owner) const {
    const size_t index = owner;
    const size_t start = index * least_ + std::min(index, longer_);
    const size_t elements = least_ + (index < longer_ ? 1 : 0);
    return {start * problem_.element_bytes, elements * problem_.element_bytes, grain_};
  }
  /// Bytes of the largest chunk.
  size_t largest() const { return of(0).bytes == 0 ? 0 : of(0).at(Place::kOutput, 0).bytes; }

 private:
  const Problem& problem_;
  size_t least_, longer_, grain_;
};

/// The two passes around the ring. In step k of the first, rank r sends what it has of segment r - k and combines
/// segment r - k - 1; then segment r + 1 is complete here, and the second pass carries the complete ones round.
class Ring {
 public:
  explicit Ring(const Problem& problem)
      : problem_(problem), segments_(problem), next_(around(problem, 1)), previous_(around(problem, -1)) {
    for (Range& slot : slots_) slot = builder_.scratch(segments_.largest());
    sent_.resize(problem.size);
    arrived_.resize(problem.size);
  }

  Schedule build() {
    for (int k = 0; k < problem_.size - 1; ++k) {
      send(around(problem_, -k), k == 0 ? Place::kInput : Place::kOutput);
      combine(around(problem_, -k - 1));
    }
    for (int k = 0; k < problem_.size - 1; ++k) {
      send(around(problem_, 1 - k), Place::kOutput);
      receive(around(problem_, -k));
    }
    return builder_.take();
  }

 private:
  static constexpr uint32_t kSlots = 2;  // receives in flight before they are combined

  // The chunks of a segment leave one by one as they arrive.
  void send(Rank segment, Place place) {
    const Chunks chunks = segments_.of(segment);
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      const uint32_t had = arrived_[segment].empty() ? Step::kNone : arrived_[segment][i];
      sent_[segment].push_back(builder_.send(next_, chunks.at(place, i), {had}));
    }
  }

  void combine(Rank segment) {
    const Chunks chunks = segments_.of(segment);
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      const uint32_t slot = combined_++ % kSlots;
      const Range here = chunks.at(Place::kOutput, i);
      const Range scratch{Place::kScratch, slots_[slot].offset, here.bytes};
      last_use_[slot] =
          builder_.receive_reduce(previous_, scratch, chunks.at(Place::kInput, i), here, {last_use_[slot]});
      arrived_[segment].push_back(last_use_[slot]);
    }
  }

  // Overwrites the partial sum that was sent in the first pass.
  void receive(Rank segment) {
    const Chunks chunks = segments_.of(segment);
    arrived_[segment].clear();
    for (uint32_t i = 0; i < chunks.count(); ++i) {
      arrived_[segment].push_back(builder_.receive(previous_, chunks.at(Place::kOutput, i), {sent_[segment][i]}));
    }
  }

  const Problem& problem_;
  Segments segments_;
  Rank next_, previous_;
  ScheduleBuilder builder_;
  Range slots_[kSlots];
  uint32_t last_use_[kSlots] = {Step::kNone, Step::kNone};
  uint32_t combined_ = 0;
  std::vector<std::vector<uint32_t>> sent_, arrived_;  // by segment and chunk: the step
};

Schedule copy_input(size_t bytes) {
  ScheduleBuilder builder;
  if (bytes > 0) builder.copy(input(0, bytes), output(0, bytes));
  return builder.take();
}

/// Recursive doubling of whole buffers among a power of two of "core" ranks. Both partners combine the lower rank's
/// data first, so that they get the same bits.
class Doubling {
 public:
  explicit Doubling(const Problem& problem)
      : rank_(problem.rank),
        bytes_(problem.count * problem.element_bytes),
        core_(static_cast<int>(std::bit_floor(static_cast<unsigned>(problem.size)))),
        extra_(problem.size - core_),
        received_(builder_.scratch(bytes_)) {}

  // The first 2 * extra ranks are pairs: the even one hands its data to the odd one and gets the result.
  Schedule build() {
    const bool paired = rank_ < 2 * extra_;
    if (paired && rank_ % 2 == 0) {
      const uint32_t sent = builder_.send(rank_ + 1, current_);
      builder_.receive(rank_ + 1, output(0, bytes_), {sent});
      return builder_.take();
    }
    if (paired) combine(rank_ - 1, builder_.receive(rank_ - 1, received_), Step::kNone);
    const int core_rank = paired ? rank_ / 2 : rank_ - extra_;
    for (int distance = 1; distance < core_; distance *= 2) exchange(rank_of(core_rank ^ distance));
    if (paired) builder_.send(rank_ - 1, current_, {combined_});
    return builder_.take();
  }

 private:
  Rank rank_of(int core_rank) const { return core_rank < extra_ ? 2 * core_rank + 1 : core_rank + extra_; }

  void exchange(Rank partner) {
    const uint32_t sent = builder_.send(partner, current_, {combined_});
    combine(partner, builder_.receive(partner, received_, {combined_}), sent);
  }

  // Writes the output, so not before what was sent from there has left.
  void combine(Rank partner, uint32_t received, uint32_t sent) {
    combined_ = builder_.reduce(received_, current_, output(0, bytes_), partner < rank_, {received, sent});
    current_ = output(0, bytes_);
  }

  ScheduleBuilder builder_;
  Rank rank_;
  size_t bytes_;
  int core_, extra_;
  Range received_;
  Range current_ = input(0, bytes_);
  uint32_t combined_ = Step::kNone;  // the step that made current_
};

/// Estimated cost, in bytes carried in the same time (latency-bandwidth model, Thakur et al. 2005, section 3).
constexpr double kMessageCost = 16 << 10;  // one message's latency
constexpr double kCombineCost = 0.5;       // combining a byte, where carrying it is 1

double doubling_cost(int size, double bytes) {
  const bool folds = !std::has_single_bit(static_cast<unsigned>(size));
  const double rounds = std::floor(std::log2(size));
  const double fold = folds ? 2 * kMessageCost + bytes * (2 + kCombineCost) : 0;
  return rounds * (kMessageCost + bytes * (1 + kCombineCost)) + fold;
}
double ring_cost(int size, double bytes) { return (size - 1) * (2 * kMessageCost + bytes / size * (2 + kCombineCost)); }

}  // namespace

Schedule ring_all_reduce(const Problem& problem) {
  check_problem(problem);
  return problem.size == 1 ? copy_input(problem.count * problem.element_bytes) : Ring(problem).build();
}

Schedule recursive_doubling_all_reduce(const Problem& problem) {
  check_problem(problem);
  const size_t bytes = problem.count * problem.element_bytes;
  return problem.size == 1 || bytes == 0 ? copy_input(bytes) : Doubling(problem).build();
}

Schedule choose_all_reduce(const Problem& problem) {
  check_problem(problem);
  const double bytes = static_cast<double>(problem.count) * static_cast<double>(problem.element_bytes);
  const bool small = doubling_cost(problem.size, bytes) <= ring_cost(problem.size, bytes);
  return small ? recursive_doubling_all_reduce(problem) : ring_all_reduce(problem);
}

}  // namespace muster
