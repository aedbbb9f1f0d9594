#pragma once

#include <condition_variable>
#include <mutex>
#include <vector>

#include "muster/group/group.h"

namespace muster {

/// Shared by the Work's copies and whoever finishes it. `result` does not change any more once `finished`.
struct Work::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool finished = false;
  Result<> result;
  Rank source = kNoRank;  ///< set before finish()
  std::vector<std::function<void(const Result<>&)>> callbacks;

  /// Wakes those who wait. What is to be called back is left to the caller: one callback may wait for another's work.
  [[nodiscard]] std::vector<std::function<void(const Result<>&)>> finish(Result<> outcome);
};

}  // namespace muster
