#pragma once

#include <memory>
#include <vector>

#include "muster/group/recorder.h"
#include "muster/torch/backward_times.h"
#include "muster/torch/step_history.h"

namespace muster {

/// What a Reducer keeps of its steps: where their time went, to compare ranks, and for `muster trace` the last of them
/// bucket by bucket. Not thread-safe. Some 50 ns a bucket.
class StepRecorder {
 public:
  explicit StepRecorder(const Membership& membership);
  /// A backward that has ended; `bytes` by bucket.
  void add(const BackwardTimes& times, const std::vector<size_t>& bytes);
  const StepHistory& history() const { return history_; }

 private:
  StepHistory history_;
  std::unique_ptr<Recorder> spans_;  ///< null where MUSTER_RECORDER turns recording off
};

}  // namespace muster
