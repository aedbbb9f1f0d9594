#pragma once

#include <span>
#include <vector>

#include "muster/collective/schedule/schedule.h"

namespace muster {

/// Slice `slice` of rank `rank`'s input.
struct Term {
  size_t slice;
  Rank rank;
  friend auto operator<=>(const Term&, const Term&) = default;
};
/// The inputs that are combined in a slice of memory. Empty if no step has written the slice yet.
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

/// Runs the schedules of all ranks on the names of slices instead of on elements. `problem` is the spec of the
/// schedules; each of its elements is a slice.
Rounds play_rounds(const CollectiveSpec& problem, std::span<const Schedule> schedules);

}  // namespace muster
