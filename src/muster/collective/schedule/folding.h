#pragma once

#include <bit>

#include "muster/collective/schedule/schedule_builder.h"

namespace muster {

/// Folding for algorithms that need a power of two (Rabenseifner 2004, section 3). Of the first 2 (n - core) ranks,
/// each even rank sends its data to the odd rank after it and gets the result from there. These odd ranks and all later
/// ranks are the core.
class Folding {
 public:
  explicit Folding(const CollectiveSpec& spec)
      : rank_(spec.rank),
        core_(static_cast<int>(std::bit_floor(static_cast<unsigned>(spec.size)))),
        extra_(spec.size - core_) {}

  int core() const { return core_; }
  bool paired() const { return rank_ < 2 * extra_; }
  bool folds_away() const { return paired() && rank_ % 2 == 0; }
  /// The other rank of a pair.
  Rank partner() const { return rank_ ^ 1; }
  /// The schedule of a rank that folds away. `result` may be a part of `data`.
  Schedule schedule_away(Range data, Range result) const {
    ScheduleBuilder builder;
    const uint32_t sent = builder.send(partner(), data);
    builder.receive(partner(), result, {sent});
    return builder.take();
  }

  /// This rank's number within the core.
  int self() const { return paired() ? rank_ / 2 : rank_ - extra_; }
  Rank rank_of(int core_rank) const { return core_rank < extra_ ? 2 * core_rank + 1 : core_rank + extra_; }
  Rank across(int distance) const { return rank_of(self() ^ distance); }
  /// The first rank whose data the core rank has. For core(), the rank count.
  Rank first_of(int core_rank) const { return core_rank < extra_ ? 2 * core_rank : core_rank + extra_; }

 private:
  Rank rank_;
  int core_, extra_;
};

}  // namespace muster
