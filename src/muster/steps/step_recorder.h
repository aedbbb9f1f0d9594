#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "muster/flight/recorder.h"
#include "muster/steps/backward_times.h"
#include "muster/steps/step_history.h"

namespace muster {

/// Records the steps of a Reducer: their times, to compare ranks, and the buckets of the last ones for `muster trace`.
/// Not thread-safe. About 50 ns a bucket.
class StepRecorder {
 public:
  explicit StepRecorder(const GroupSpec& membership);
  /// Sets the parameters of each bucket, by number, for later backwards. Parameters without a name are shown by number.
  void set_plan(const std::vector<std::string>& names, const std::vector<std::vector<size_t>>& plan);
  /// Records a backward that has ended. `bytes`: by bucket.
  void add(const BackwardTimes& times, const std::vector<size_t>& bytes);
  const StepHistory& history() const { return history_; }

 private:
  void name_parameters(Span& span, size_t last_parameter) const;

  StepHistory history_;
  std::vector<std::vector<size_t>> plan_;
  std::vector<CallSite> texts_;            ///< by bucket: the names of its parameters
  std::map<std::string, CallSite> known_;  ///< texts that the recorder stores already
  std::unique_ptr<Recorder> spans_;        ///< null if MUSTER_RECORDER turns recording off
};

}  // namespace muster
