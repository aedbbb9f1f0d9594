#pragma once

#include <bit>

#include "muster/collective/schedule/schedule.h"

namespace muster {

/// How ranks beyond a power of two take part in algorithms that need one (Rabenseifner 2004, section 3): of the first
/// 2 (n - core) ranks, each even one hands its data to the odd one behind it and gets the result from there; the odd
/// ones and the ranks behind them are the core.
class Folding {
 public:
  explicit Folding(const CollectiveSpec& spec)
      : rank_(spec.rank),
        core_(static_cast<int>(std::bit_floor(static_cast<unsigned>(spec.size)))),
        extra_(spec.size - core_) {}

  int core() const { return core_; }
  bool paired() const { return rank_ < 2 * extra_; }
  bool folds_away() const { return paired() && rank_ % 2 == 0; }
  /// Of a pair, the other one.
  Rank partner() const { return rank_ ^ 1; }

  /// Numbers within the core.
  int self() const { return paired() ? rank_ / 2 : rank_ - extra_; }
  Rank rank_of(int core_rank) const { return core_rank < extra_ ? 2 * core_rank + 1 : core_rank + extra_; }
  Rank across(int distance) const { return rank_of(self() ^ distance); }
  /// The first rank whose data the core rank stands for; behind the last one: the rank count.
  Rank first_of(int core_rank) const { return core_rank < extra_ ? 2 * core_rank : core_rank + extra_; }

 private:
  Rank rank_;
  int core_, extra_;
};

}  // namespace muster
