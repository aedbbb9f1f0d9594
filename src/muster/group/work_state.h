#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "muster/group/group.h"

namespace muster {

/// Moves an operation on while somebody waits for it, in that thread.
class WorkDriver {
 public:
  virtual ~WorkDriver() = default;
  /// Returns once the state is finished, or at the deadline.
  virtual void drive(Work::State& state, const Deadline& deadline) = 0;
};

/// Shared by the Work's copies and whoever finishes it. `result` does not change any more once `finished`.
struct Work::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool finished = false;
  Result<> result;
  Rank source = kNoRank;  ///< set before finish()
  /// Null: others finish it, waiting does not help. Let go by finish(). Shared: a wait may outlast the group.
  std::shared_ptr<WorkDriver> driver;
  std::vector<std::function<void(const Result<>&)>> callbacks;

  /// Wakes those who wait. What is to be called back is left to the caller: one callback may wait for another's work.
  [[nodiscard]] std::vector<std::function<void(const Result<>&)>> finish(Result<> outcome);
};

}  // namespace muster
