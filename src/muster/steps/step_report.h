#pragma once

#include <string>
#include <vector>

#include "muster/steps/backward_times.h"

namespace muster {

/// The communication and the waits of one step of data-parallel training, from the times of its backward. All durations
/// are those of this rank. A reduction includes the wait for other ranks (step_stragglers.h names them).
struct StepReport {
  struct Bucket {
    std::vector<std::string> parameters;
    size_t bytes = 0;
    BucketTimes times;
    TimePoint started;  ///< when its reduction was begun and the reductions before it had ended
    std::string last;   ///< the parameter whose gradient filled it
    Duration reduction() const { return times.ended - started; }
  };

  BackwardTimes times;
  std::vector<Bucket> buckets;  ///< in the order of reduction
  Duration communication{};     ///< while at least one bucket was being reduced
  Duration exposed{};           ///< the part after the last gradient: the step waited for it
  std::vector<std::string> advice;

  /// The share of the communication during which backward still ran. 1 is the best value, and also the value without
  /// communication.
  double overlap_ratio() const;
  /// Text: one line for the step, one for each bucket, one for each piece of advice.
  std::string to_string() const;
};

/// `names`: by parameter. `plan`: the parameters of each bucket (Reducer::bucket_parameters()). `bytes`: by bucket. The
/// report has no buckets if the plan was rebuilt after `times` were taken.
StepReport step_report(BackwardTimes times, const std::vector<std::string>& names,
                       const std::vector<std::vector<size_t>>& plan, const std::vector<size_t>& bytes);

/// Changes that would shorten the wait, the most useful first. Empty if no change is worthwhile.
std::vector<std::string> advise(const StepReport& report);

}  // namespace muster
