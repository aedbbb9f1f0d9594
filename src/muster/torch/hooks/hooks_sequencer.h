#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "muster/group/group.h"

namespace muster {

/// Continues operations in the order in which they were begun, on a thread of its own, which starts with the first:
/// that order is the same at all ranks, the one in which they end is not.
class HookSequencer {
 public:
  using Step = std::function<void(const Result<>&)>;

  HookSequencer() = default;
  /// Steps whose work is not done are called with kAborted, and keep what they hold until it is. Does not wait for
  /// that, as a step may let go of tensors for which it needs a lock that the caller holds (Python's): the thread ends
  /// by itself.
  ~HookSequencer();
  HookSequencer(const HookSequencer&) = delete;
  HookSequencer& operator=(const HookSequencer&) = delete;

  /// Calls `step` with the result of `work`, after all earlier steps. It may block for later works of other groups. At
  /// most as many wait as a model has buckets.
  void then(const Work& work, Step step);

 private:
  struct Queue;
  std::shared_ptr<Queue> queue_;  // shared with its thread and the callbacks of works, which may end later than this
};

}  // namespace muster
