#pragma once

#include <string>
#include <vector>

#include "muster/group/group.h"
#include "muster/steps/step_history.h"

namespace muster {

/// Shows which rank the other ranks wait for, from the histories of all ranks. A late rank waits least for
/// communication after its own backward, so clocks need not be compared.
struct StragglerReport {
  struct RankStats {
    uint64_t last = 0;  ///< steps in which its gradients were the last
    float lag = 0;      ///< seconds after the second to last rank, on average over these steps
    StepTimes excess;   ///< each part of a step in seconds on average, minus the median over the ranks
  };

  uint64_t steps = 0;
  float step = 0;  ///< seconds on average
  std::vector<RankStats> ranks;

  /// The rank that was last most often; kNoRank without steps or with a single rank.
  Rank slowest_rank() const;
  /// True if the slowest rank is last at least twice as often as by chance, and costs at least 1 % of a step.
  bool is_significant() const;
  /// "rank 3 was last in 82 % of 200 steps, by 5.3 ms on average; its backward takes 5.1 ms longer than the others'"
  std::string to_string() const;
};

/// `steps`: steps[rank][step], with the same number of steps for each rank.
StragglerReport compare(const std::vector<std::vector<StepTimes>>& steps);

/// Collective. Exchanges the last `steps` steps (at most StepHistory::kSteps) by one all_gather of 16 B a step. `steps`
/// must be the same at all ranks.
Result<StragglerReport> find_stragglers(Group& group, const StepHistory& history, uint64_t steps);

}  // namespace muster
