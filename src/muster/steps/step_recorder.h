#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "muster/flight/recorder.h"
#include "muster/steps/backward_times.h"
#include "muster/steps/step_history.h"

namespace muster {

/// What a Reducer keeps of its steps: where their time went, to compare ranks, and for `muster trace` the last of them
/// bucket by bucket. Not thread-safe. Some 50 ns a bucket.
class StepRecorder {
 public:
  explicit StepRecorder(const GroupSpec& membership);
  /// What the buckets of later backwards hold: numbers of parameters, by bucket. Those without a name go by number.
  void set_plan(const std::vector<std::string>& names, const std::vector<std::vector<size_t>>& plan);
  /// A backward that has ended; `bytes` by bucket.
  void add(const BackwardTimes& times, const std::vector<size_t>& bytes);
  const StepHistory& history() const { return history_; }

 private:
  void name_parameters(Span& span, size_t last_parameter) const;

  StepHistory history_;
  std::vector<std::vector<size_t>> plan_;
  std::vector<CallSite> texts_;            ///< by bucket: the names of its parameters
  std::map<std::string, CallSite> known_;  ///< texts that the recorder keeps
  std::unique_ptr<Recorder> spans_;        ///< null where MUSTER_RECORDER turns recording off
};

}  // namespace muster
