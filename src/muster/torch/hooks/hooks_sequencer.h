#pragma once

#include <functional>
#include <memory>

#include "muster/group/group.h"

namespace muster {

/// Runs the second phases of operations on a thread of its own, in the order in which the operations were submitted.
/// That order is the same at all ranks; the order in which operations end is not.
class HookSequencer {
 public:
  using Step = std::function<void(const Result<>&)>;

  HookSequencer() = default;
  /// Calls the steps whose work is not done with kAborted, and destroys each of these steps when its work is done. Does
  /// not wait: a step may release tensors, for which it needs a lock that the caller may hold (Python's GIL). The
  /// thread ends by itself.
  ~HookSequencer();
  HookSequencer(const HookSequencer&) = delete;
  HookSequencer& operator=(const HookSequencer&) = delete;

  /// Calls `step` with the result of `work`, after all earlier steps. A step may wait for works of other groups.
  /// Callers queue one step for each bucket, or for each chunk of a bucket, so the queue is bounded.
  void then(const Work& work, Step step);

 private:
  struct Queue;
  std::shared_ptr<Queue> queue_;  // shared with its thread and with callbacks, which may end later
};

}  // namespace muster
