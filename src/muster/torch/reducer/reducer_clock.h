#pragma once

#include <memory>
#include <vector>

#include "muster/steps/step_recorder.h"
#include "muster/torch/reducer/reducer_buckets.h"

namespace muster {

/// The times of the current backward, and the record of those that have ended.
class BackwardClock {
 public:
  explicit BackwardClock(const GroupSpec& membership) : recorder_(membership) {}

  void begin_forward() { current_.forward = steady_clock().now(); }
  void first_gradient() { current_.backward = steady_clock().now(); }
  void last_gradient() { current_.waited = steady_clock().now(); }
  /// The reducer returns to autograd's engine, which calls it again when the whole backward ends.
  void pause() { paused_ = steady_clock().now(); }
  void resume();
  /// In the last backward the engine had more to do after the last gradient: layers that are not this model's.
  bool engine_continues() const { return engine_continues_; }
  void end(const std::vector<std::shared_ptr<Bucket>>& buckets);
  void set_plan(const std::vector<std::string>& names, const BucketPlan& plan);

  /// Of the last backward that has ended.
  const BackwardTimes& last() const { return last_; }
  const StepHistory& history() const { return recorder_.history(); }

 private:
  BackwardTimes current_, last_;
  TimePoint paused_;
  bool engine_continues_ = false;
  StepRecorder recorder_;
};

}  // namespace muster
