#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "muster/base/clock.h"

namespace muster {

/// When what happened to one bucket in the last backward. On steady_clock(); zero: did not happen.
struct BucketTimes {
  TimePoint first_ready;      ///< its first gradient had arrived
  TimePoint ready;            ///< its last gradient had arrived
  TimePoint begun;            ///< its reduction was handed to the group or the hook
  TimePoint ended;            ///< the result was there
  size_t last_parameter = 0;  ///< whose gradient came last
};
/// When a reduction had its turn: begun, and all before it ended by `free`. Where there was none, when it would have
/// ended.
inline TimePoint started(const BucketTimes& bucket, TimePoint free) {
  if (bucket.begun.ns == 0) return bucket.ended;
  return std::max(bucket.begun, std::min(free, bucket.ended));
}

struct BackwardTimes {
  uint64_t iteration = 0;                      ///< of those that reduced, from 1
  TimePoint forward, backward;  ///< prepare_for_forward(), first gradient
  /// From here to the end backward waited for reductions: the last gradient, or later by as long as autograd was then
  /// busy with layers outside the model.
  TimePoint waited;
  TimePoint ended;
  std::vector<BucketTimes> buckets;
};

}  // namespace muster
