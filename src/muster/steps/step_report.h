#pragma once

#include <string>
#include <vector>

#include "muster/steps/backward_times.h"

namespace muster {

/// What a step of data-parallel training waited for, from the times of its backward. A value; all durations are this
/// rank's, and a reduction includes waiting for the others (step_stragglers.h says for whom).
struct StepReport {
  struct Bucket {
    std::vector<std::string> parameters;
    size_t bytes = 0;
    BucketTimes times;
    TimePoint started;  ///< its reduction: when it was begun and those before it had ended
    std::string last;   ///< the parameter whose gradient filled it
    Duration reduction() const { return times.ended - started; }
  };

  BackwardTimes times;
  std::vector<Bucket> buckets;  ///< in the order of reduction: the plan
  Duration communication{};     ///< during which at least one bucket was being reduced
  Duration exposed{};           ///< of that, after the last gradient had come: what the step waited for
  std::vector<std::string> advice;

  /// The share of the communication during which backward still ran: 1 is the best, also where there was none.
  double hidden() const;
  /// For people: a line for the step, one for each bucket, one for each advice.
  std::string to_string() const;
};

/// `names` by parameter, `plan` the parameters of each bucket (Reducer::bucket_parameters()), `bytes` by bucket. Where
/// the plan is not the one that `times` were taken with (it was rebuilt since) the report has no buckets.
StepReport step_report(BackwardTimes times, const std::vector<std::string>& names,
                       const std::vector<std::vector<size_t>>& plan, const std::vector<size_t>& bytes);

/// What could be changed to wait less, most worth first. Empty where nothing is worth it.
std::vector<std::string> advise(const StepReport& report);

}  // namespace muster
