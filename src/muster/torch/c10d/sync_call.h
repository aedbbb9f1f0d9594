#pragma once

#include "muster/torch/backend.h"
#include "muster/torch/c10d/gil_release.h"
#include "muster/torch/exception.h"

namespace muster {

/// Reports a call that runs in the caller's thread to the profiler and to the completion hook. Releases the GIL
/// meanwhile, if this thread holds it.
class ProcessGroupMuster::SyncCallScope {
 public:
  SyncCallScope(const ProcessGroupMuster& backend, const TensorRequest& request, at::TensorList inputs)
      : backend_(backend), type_(request.type), has_hook_(backend.pending_->has_hook()), event_(request.title, inputs) {
    if (has_hook_) began_ = steady_clock().now();
  }
  /// `sequence`: the group's number for the call. Throws the operation's error.
  void end(const Result<>& result, uint64_t sequence) {
    if (has_hook_) backend_.pending_->run_hook(type_, sequence, began_, steady_clock().now());
    if (!result) throw_error(result.error());
  }

 private:
  const GilRelease no_gil_;
  const ProcessGroupMuster& backend_;
  const c10d::OpType type_;
  const bool has_hook_;
  const ProfilerEvent event_;
  TimePoint began_{};
};

}  // namespace muster
