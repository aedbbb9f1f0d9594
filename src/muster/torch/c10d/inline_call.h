#pragma once

#include "muster/torch/backend.h"
#include "muster/torch/exception.h"

namespace muster {

/// What is to be seen of a call that runs in the caller's thread: a profiler's event, and the completion hook's.
class ProcessGroupMuster::SyncCallScope {
 public:
  SyncCallScope(const ProcessGroupMuster& backend, const Request& request, at::TensorList inputs)
      : backend_(backend), type_(request.type), hooked_(backend.pending_->hooked()), event_(request.title, inputs) {
    if (hooked_) began_ = steady_clock().now();
  }
  /// `sequence`: the group's number for the call. Throws the operation's error.
  void end(const Result<>& result, uint64_t sequence) {
    if (hooked_) backend_.pending_->tell(type_, sequence, began_, steady_clock().now());
    if (!result) throw_error(result.error());
  }

 private:
  const ProcessGroupMuster& backend_;
  const c10d::OpType type_;
  const bool hooked_;
  const ProfilerEvent event_;
  TimePoint began_{};
};

}  // namespace muster
