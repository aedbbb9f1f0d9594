#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "muster/group/group.h"

namespace muster {

/// Drives an operation on the thread that waits for it.
class WorkDriver {
 public:
  virtual ~WorkDriver() = default;
  /// Returns once the state is finished, or at the deadline.
  virtual void drive(Work::State& state, const Deadline& deadline) = 0;
};

/// Shared by the copies of a Work and the component that finishes it. `result` does not change once `finished`.
struct Work::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool finished = false;
  Result<> result;
  Rank source = kNoRank;  ///< set before finish()
  /// Null: a waiting thread cannot drive the operation. Reset by finish(). Shared: a wait may outlast the group.
  std::shared_ptr<WorkDriver> driver;
  std::vector<std::function<void(const Result<>&)>> callbacks;

  /// Wakes the waiting threads. Returns the callbacks, for the caller to run: one may wait for the work of another.
  [[nodiscard]] std::vector<std::function<void(const Result<>&)>> finish(Result<> outcome);
};

}  // namespace muster
