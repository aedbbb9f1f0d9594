#pragma once

#include <string>
#include <vector>

#include "muster/group/group.h"
#include "muster/steps/step_history.h"

namespace muster {

/// Which rank the others wait for, from the histories of all. A rank that is late waits least for communication once
/// its own backward is through, so no clocks have to be compared.
struct StragglerReport {
  struct OfRank {
    uint64_t last = 0;  ///< steps in which it was the last to have its gradients
    float behind = 0;   ///< seconds after the last but one, on average over these steps
    StepTimes longer;   ///< seconds on average of each part of all steps, beyond the median of the ranks
  };

  uint64_t steps = 0;
  float step = 0;  ///< seconds on average
  std::vector<OfRank> ranks;

  /// Who was last most often; kNoRank without steps, or with a single rank.
  Rank latest() const;
  /// Whether latest() costs the others something worth naming: last twice as often as chance has it, and 1 % of a step.
  bool stands_out() const;
  /// "rank 3 was last in 82 % of 200 steps, by 5.3 ms on average; its backward takes 5.1 ms longer than the others'"
  std::string to_string() const;
};

/// steps[rank][step]; as many steps of each rank.
StragglerReport compare(const std::vector<std::vector<StepTimes>>& steps);

/// Exchanges the last `steps` (at most StepHistory::kSteps) by one all_gather of 16 B a step. All ranks must call it
/// with the same number, with no other call of the group in between.
Result<StragglerReport> find_stragglers(Group& group, const StepHistory& history, uint64_t steps);

}  // namespace muster
