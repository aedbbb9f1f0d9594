#pragma once

#include <span>
#include <vector>

#include "muster/collective/schedule/schedule.h"

namespace muster {

/// Which inputs a slice of memory is made of: slice `slice` of rank `rank`'s input. Empty: nothing was written yet.
struct Term {
  size_t slice;
  Rank rank;
  friend auto operator<=>(const Term&, const Term&) = default;
};
using SliceValue = std::vector<Term>;

/// A collective in rounds: messages that do not wait for each other are in one round.
struct Rounds {
  struct Message {
    int round;  ///< from 1
    Rank from, to;
    std::vector<SliceValue> slices;
    friend bool operator==(const Message&, const Message&) = default;
  };
  std::vector<Message> messages;                           ///< by round, then sender
  std::vector<std::vector<std::vector<SliceValue>>> held;  ///< by round (0: inputs), rank, slice of the output
};

/// Plays the schedules of all ranks through with the names of slices in place of their elements. `problem` is that of
/// the schedules; each of its elements is a slice.
Rounds play_rounds(const CollectiveSpec& problem, std::span<const Schedule> schedules);

}  // namespace muster
