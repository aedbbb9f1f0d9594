#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "muster/group/group.h"

namespace muster {

/// Makes progress with an operation on the thread that waits for it.
class WorkDriver {
 public:
  virtual ~WorkDriver() = default;
  /// Returns when the state is finished, or at the deadline. May return earlier: then another thread finishes it.
  virtual void drive(Work::State& state, const Deadline& deadline) = 0;
};

/// Shared by the copies of a Work and the component that finishes it. `mutex` guards all fields. `result` does not
/// change once `finished` is true.
struct Work::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool finished = false;
  Result<> result;
  Rank source = kNoRank;  ///< must be set before finish()
  /// Null if a waiting thread cannot drive the operation. finish() resets it. A shared_ptr, because a wait may outlive
  /// the group.
  std::shared_ptr<WorkDriver> driver;
  std::vector<std::function<void(const Result<>&)>> callbacks;

  /// Sets the result and wakes the waiting threads. Returns the callbacks, which the caller must run without a lock: a
  /// callback may wait for another operation.
  [[nodiscard]] std::vector<std::function<void(const Result<>&)>> finish(Result<> outcome);
};

}  // namespace muster
