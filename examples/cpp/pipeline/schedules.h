// Pipeline schedules: in which order each rank runs its passes. ../../python/pipeline/schedules.py makes the same ones.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

/// kWeights: the gradients of the weights, which zero-bubble takes out of the backward pass.
enum class Pass : char { kForward = 'F', kBackward = 'B', kWeights = 'W' };

/// A pass of one microbatch through one stage.
struct Action {
  Pass pass;
  int64_t stage, microbatch;
  auto operator<=>(const Action&) const = default;
};
using Actions = std::vector<Action>;

/// orders: the actions of each rank, in their order. Stage s is on rank s % ranks.
struct Schedule {
  std::string name;
  int64_t stages = 0, microbatches = 0;
  std::vector<Actions> orders;

  int64_t ranks() const { return static_cast<int64_t>(orders.size()); }
  /// Whether the gradients of the weights are actions of their own.
  bool splits_backward() const { return name == "zero-bubble"; }
  /// The action of another rank whose result this one takes.
  std::optional<Action> needed_by(const Action& action) const {
    const int64_t from = action.stage + (action.pass == Pass::kForward ? -1 : 1);
    if (action.pass == Pass::kWeights || from < 0 || from == stages) return std::nullopt;
    return Action{action.pass, from, action.microbatch};
  }
  /// The share of a step in which a rank waits, if all stages are alike, a backward pass takes twice as long as a
  /// forward pass, half of it is for the weights, and messages take no time.
  double expected_bubble() const {
    double waiting = 3.0 * static_cast<double>(ranks() - 1);  // 1 for each forward pass, 2 for each backward pass
    if (name == "interleaved") waiting /= 2;                  // a pass through one stage is half as long
    if (splits_backward()) waiting /= 3;                      // only the forward pass remains
    return waiting / (3 * static_cast<double>(microbatches) + waiting);
  }
};

/// `first` forward passes, then one forward and one backward pass in turn, then the other backward passes.
inline Actions alternate(const Actions& forwards, const Actions& backwards, int64_t first) {
  const auto ahead = std::min(static_cast<size_t>(first), forwards.size());
  Actions order(forwards.begin(), forwards.begin() + static_cast<int64_t>(ahead));
  for (size_t next = 0; next < backwards.size(); ++next) {
    if (ahead + next < forwards.size()) order.push_back(forwards[ahead + next]);
    order.push_back(backwards[next]);
  }
  return order;
}

inline Actions passes(Pass pass, int64_t stage, int64_t microbatches) {
  Actions all;
  for (int64_t number = 0; number < microbatches; ++number) all.push_back({pass, stage, number});
  return all;
}

/// All forward passes, then all backward passes (Huang et al. 2019). Keeps the activations of all microbatches.
inline Actions gpipe(int64_t rank, int64_t /*ranks*/, int64_t microbatches) {
  return alternate(passes(Pass::kForward, rank, microbatches), passes(Pass::kBackward, rank, microbatches),
                   microbatches);
}

/// A backward pass follows as soon as possible, then the next forward pass (Narayanan et al. 2019). Rank r keeps the
/// activations of ranks - r microbatches.
inline Actions one_f_one_b(int64_t rank, int64_t ranks, int64_t microbatches) {
  return alternate(passes(Pass::kForward, rank, microbatches), passes(Pass::kBackward, rank, microbatches),
                   ranks - rank - 1);
}

/// 1F1B with two stages on each rank, so that a rank waits for half as long (Narayanan et al. 2021).
inline Actions interleaved(int64_t rank, int64_t ranks, int64_t microbatches) {
  if (microbatches % ranks != 0) {
    throw std::invalid_argument("interleaved: " + std::to_string(microbatches) +
                                " microbatches are not a multiple of " + std::to_string(ranks) + " ranks");
  }
  Actions forwards, backwards;
  for (int64_t index = 0; index < 2 * microbatches; ++index) {  // `ranks` through one stage, then through the other one
    const int64_t half = index / ranks % 2, microbatch = index / (2 * ranks) * ranks + index % ranks;
    forwards.push_back({Pass::kForward, rank + half * ranks, microbatch});
    backwards.push_back({Pass::kBackward, rank + (1 - half) * ranks, microbatch});
  }
  return alternate(forwards, backwards, 2 * (ranks - rank - 1) + ranks);
}

/// 1F1B whose gradients of weights fill the gaps: ZB-H1 (Qi et al. 2023). Keeps no more activations than 1F1B does on
/// its first rank.
inline Actions zero_bubble(int64_t rank, int64_t ranks, int64_t microbatches) {
  Actions order;
  int64_t late = 0;
  for (const Action& action : one_f_one_b(rank, ranks, microbatches)) {
    order.push_back(action);
    const bool behind = action.pass == Pass::kBackward && action.microbatch >= rank;
    if (behind) order.push_back({Pass::kWeights, rank, late++});  // each rank is `rank` behind with the weights
  }
  while (late < microbatches) order.push_back({Pass::kWeights, rank, late++});
  return order;
}

/// Throws std::invalid_argument for another name, and for a number of microbatches that the schedule cannot do.
inline Schedule make_schedule(const std::string& name, int64_t ranks, int64_t microbatches) {
  const bool known = name == "gpipe" || name == "1f1b" || name == "interleaved" || name == "zero-bubble";
  if (!known) throw std::invalid_argument("--schedules takes gpipe, 1f1b, interleaved and zero-bubble, not " + name);
  const auto make = name == "gpipe"         ? gpipe
                    : name == "1f1b"        ? one_f_one_b
                    : name == "interleaved" ? interleaved
                                            : zero_bubble;
  if (name == "interleaved" && ranks == 1) throw std::invalid_argument("interleaved needs at least 2 processes");
  Schedule schedule{name, name == "interleaved" ? 2 * ranks : ranks, microbatches, {}};
  for (int64_t rank = 0; rank < ranks; ++rank) schedule.orders.push_back(make(rank, ranks, microbatches));
  return schedule;
}
