#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "muster/base/clock.h"

namespace muster {

/// The parts of one step, in seconds.
struct StepTimes {
  float between_steps = 0;  ///< since the end of the last backward: optimizer, data
  float forward = 0;        ///< until the first gradient: forward and loss
  float backward = 0;       ///< from the first to the last gradient, with layers outside the model
  float waiting = 0;        ///< until all buckets were reduced: communication without overlap
};

/// The last steps of a Reducer, numbered from 1. The numbers are the same at all ranks, so that histories can be
/// compared. Not thread-safe. About 10 ns a step.
class StepHistory {
 public:
  static constexpr uint64_t kSteps = 1024;

  /// `forward` may be zero if it is not known.
  void add(TimePoint forward, TimePoint first_gradient, TimePoint last_gradient, TimePoint ended) {
    if (forward.ns == 0) forward = first_gradient;
    StepTimes& step = ring_[count_++ % kSteps];
    step.between_steps = ended_.ns == 0 ? 0 : seconds(forward - ended_);
    step.forward = seconds(first_gradient - forward);
    step.backward = seconds(last_gradient - first_gradient);
    step.waiting = seconds(ended - last_gradient);
    ended_ = ended;
  }

  uint64_t count() const { return count_; }
  /// The number of the oldest step that is kept, or count() + 1.
  uint64_t first() const { return count_ - std::min(count_, kSteps) + 1; }
  /// first() <= number <= count().
  const StepTimes& step(uint64_t number) const { return ring_[(number - 1) % kSteps]; }

 private:
  static float seconds(Duration duration) { return static_cast<float>(duration.count()) * 1e-9F; }

  uint64_t count_ = 0;
  TimePoint ended_;
  std::array<StepTimes, kSteps> ring_{};
};

}  // namespace muster
