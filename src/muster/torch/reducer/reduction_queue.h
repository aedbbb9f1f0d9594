#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "muster/torch/hooks/hooks_base.h"
#include "muster/torch/reducer/reducer_buckets.h"
#include "muster/torch/reducer/reducer_parts.h"

namespace muster {

/// Submits full buckets in their order to the group or to the communication hook, and waits for the results. If a hook
/// fails while a group is dead, the group's error replaces the hook's error, because a Python hook reports the same
/// failure in exception types of its own.
class ReductionQueue {
 public:
  ReductionQueue(const ReducerContext& context, const GradientBuckets& buckets)
      : context_(context), buckets_(buckets) {}

  /// `groups`: those that the hook uses besides the reducer's.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::vector<std::shared_ptr<Group>> groups) {
    hook_ = std::move(hook);
    hook_groups_ = std::move(groups);
  }
  c10d::CommHookInterface* hook() const { return hook_.get(); }
  /// False with a user's hook, which expects the gradients in a bucket's buffer without gaps.
  bool aligns_gradients() const { return !hook_ || is_native(); }
  /// True if nothing has to be reduced.
  bool is_single_rank() const { return context_.size() == 1 && !hook_; }
  JoinScale& join_scale() { return join_scale_; }
  void wait_at_end(HookFuture future) { futures_.push_back(std::move(future)); }

  void begin_backward() { begun_ = 0; }
  /// Submits the buckets that are full, up to the first that is not. The last bucket is reduced in this thread if
  /// `last_inline`.
  void submit_full(bool last_inline);
  size_t begun() const { return begun_; }
  bool all_begun() const { return begun_ == buckets_.all().size(); }
  /// Reduces the sparse buckets, which cannot be submitted asynchronously.
  void reduce_deferred();
  /// Waits until the hook has completed all futures. Until then the hook may submit further operations.
  void wait_for_hooks() const;
  /// Waits for the bucket's reduction; on a device, the current stream waits instead. Returns the reduced buffer, which
  /// is the bucket's own or the hook's.
  at::Tensor result_of(Bucket& bucket) const;
  /// Waits for the futures that wait_at_end() was given.
  void finish();

  /// After a failure: waits for everything that was submitted, because it may write to gradients. Fails if a hook's
  /// future is not complete within the group's timeout.
  Result<> drain();
  /// The error of the first dead group among the reducer's group and the groups of the hook.
  Result<> groups_status() const;

 private:
  template <class Body>
  auto with_hook_errors(Body body) const;
  bool is_native() const { return dynamic_cast<const NativeHook*>(hook_.get()) != nullptr; }
  bool is_deferred(const Bucket& bucket) const;
  void submit(size_t index, bool inline_call);
  c10::intrusive_ptr<TensorWork> begin_on_device(const at::Tensor& buffer) const;
  void wait_for_future(const HookFuture& future, const Bucket* bucket) const;

  const ReducerContext& context_;
  const GradientBuckets& buckets_;
  std::unique_ptr<c10d::CommHookInterface> hook_;
  std::vector<std::shared_ptr<Group>> hook_groups_;  // shared with the hook
  size_t begun_ = 0;                                 ///< buckets that were submitted in this backward
  std::vector<HookFuture> futures_;                  ///< to wait for at the end of backward
  JoinScale join_scale_;
};

}  // namespace muster
