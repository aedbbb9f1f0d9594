#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "muster/base/clock.h"

namespace muster {

/// Times of one bucket in the last backward, on steady_clock(). Zero: did not happen.
struct BucketTimes {
  TimePoint first_ready;      ///< its first gradient arrived
  TimePoint ready;            ///< its last gradient arrived
  TimePoint begun;            ///< its reduction was submitted to the group or the hook
  TimePoint ended;            ///< its reduction was complete
  size_t last_parameter = 0;  ///< the parameter whose gradient arrived last
};
/// The time at which a reduction could start: it was begun, and the reductions before it had ended (at `free`). For a
/// bucket without a reduction, the bucket's end.
inline TimePoint started(const BucketTimes& bucket, TimePoint free) {
  if (bucket.begun.ns == 0) return bucket.ended;
  return std::max(bucket.begun, std::min(free, bucket.ended));
}

struct BackwardTimes {
  uint64_t iteration = 0;       ///< number of backwards that reduced, including this one
  TimePoint forward, backward;  ///< prepare_for_forward(), first gradient
  /// The last gradient arrived, and autograd had finished layers outside the model. From here to `ended`, backward
  /// waits for reductions.
  TimePoint last_gradient;
  TimePoint ended;
  std::vector<BucketTimes> buckets;
};

}  // namespace muster
