#pragma once

#include <vector>

#include "muster/steps/step_recorder.h"
#include "muster/torch/reducer/reducer_buckets.h"

namespace muster {

/// The times of the current backward, and the record of earlier backwards.
class BackwardClock {
 public:
  explicit BackwardClock(const GroupSpec& membership) : recorder_(membership) {}

  void begin_forward() { current_.forward = steady_clock().now(); }
  void first_gradient() { current_.backward = steady_clock().now(); }
  void last_gradient() { current_.last_gradient = steady_clock().now(); }
  /// The reducer returns to autograd's engine, which calls it again when the whole backward ends.
  void pause() { paused_ = steady_clock().now(); }
  void resume() {
    constexpr Duration kMinForThread = std::chrono::microseconds(100);  // several times the cost of an async call
    const Duration elsewhere = steady_clock().now() - paused_;
    engine_continues_ = elsewhere > kMinForThread;
    current_.last_gradient = current_.last_gradient + elsewhere;  // in that time backward did not wait for reductions
  }
  /// True if, in the last backward, the engine had more to do after the last gradient: layers outside this model.
  bool engine_continues() const { return engine_continues_; }
  void end(const GradientBuckets& buckets) {
    current_.buckets.clear();
    for (const auto& bucket : buckets.all()) current_.buckets.push_back(bucket->times);
    current_.ended = steady_clock().now();
    ++current_.iteration;
    last_ = current_;
    recorder_.add(last_, buckets.bytes());
  }
  void set_plan(const std::vector<std::string>& names, const BucketPlan& plan) {
    last_.buckets.assign(plan.size(), {});
    recorder_.set_plan(names, plan);
  }

  /// Times of the last backward that has ended.
  const BackwardTimes& last() const { return last_; }
  const StepHistory& history() const { return recorder_.history(); }

 private:
  BackwardTimes current_, last_;
  TimePoint paused_;
  bool engine_continues_ = false;
  StepRecorder recorder_;
};

}  // namespace muster
