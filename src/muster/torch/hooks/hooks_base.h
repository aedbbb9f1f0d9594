#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "muster/torch/c10d/allocator.h"
#include "muster/torch/hooks.h"
#include "muster/torch/hooks/hooks_sequencer.h"

namespace muster {

using HookFuture = c10::intrusive_ptr<c10::ivalue::Future>;

HookFuture new_future();
/// False if the future is not complete when the deadline comes.
bool wait_until(const HookFuture& future, const Deadline& deadline);
/// Completes the future with `value`, or with the error of `result`.
void complete(const HookFuture& future, const Result<>& result, c10::IValue value);

/// What all hooks share: buckets that need no compression, and ends.
class NativeHook : public c10d::CommHookInterface {
 public:
  explicit NativeHook(HookGroups groups);
  HookFuture runHook(c10d::GradBucket& bucket) final;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 protected:
  /// Of a float32 bucket, at one of several ranks.
  virtual HookFuture reduce(c10d::GradBucket& bucket) = 0;
  HookFuture average(const at::Tensor& buffer) const;

  Group& group() const { return *groups_.group; }
  const std::shared_ptr<Group>& second() const { return groups_.second; }
  Rank rank() const { return group().membership().rank; }
  int size() const { return group().membership().size; }
  /// Memory for messages, which the ranks of this host see if they share any; zeros.
  at::Tensor message(size_t count, at::ScalarType dtype) const;

 private:
  const HookGroups groups_;
};

/// A hook whose reductions have a second step.
class TwoPhaseHook : public NativeHook {
 public:
  explicit TwoPhaseHook(HookGroups groups);
  /// Ends what has not got its result, here and at the other ranks.
  ~TwoPhaseHook() override;

 protected:
  /// Calls `step` with the work's result when all that was begun before has ended, on the sequencer's thread. It
  /// settles `future`, or one after it does.
  template <class Step>
  void after(const Work& work, const HookFuture& future, Step step) {
    last_ = future;
    sequencer_.then(work, [second = second(), step](const Result<>& result) {
      if (!result) second->abort(result.error());  // the other ranks may be waiting there
      step(result);
    });
  }
  /// Once `first` is done, `next` makes the second message out of it, which `submit` sends over the group that it is
  /// given; then `finish` brings the average into `buffer`. All of them run on the sequencer's thread, which may
  /// outlive this.
  template <class Next, class Submit, class Finish>
  HookFuture then(const Work& first, const at::Tensor& buffer, Next next, Submit submit, Finish finish) {
    const HookFuture future = last_ = new_future();
    sequencer_.then(first, [second = second(), future, buffer, next, submit, finish](Result<> result) {
      if (result) {
        next();
        result = submit(*second).wait();
        if (result) finish();
      } else {
        second->abort(result.error());  // the other ranks may be waiting there
      }
      complete(future, result, buffer);
    });
    return future;
  }

 private:
  HookSequencer sequencer_;
  HookFuture last_;  ///< of its steps: they run in order, so all others complete before it
};

/// What a hook keeps of each bucket between steps: a State, which begins anew when the bucket has become another.
template <class State>
class BucketStates {
 public:
  /// Shared with the operations that use it.
  template <class Make>
  const std::shared_ptr<State>& of(const c10d::GradBucket& bucket, Make make) {
    if (bucket.getIndex() >= known_.size()) known_.resize(bucket.getIndex() + 1);
    Known& known = known_[bucket.getIndex()];
    std::vector<const void*> parameters;
    for (const at::Tensor& parameter : bucket.getParameters()) parameters.push_back(parameter.unsafeGetTensorImpl());
    const int64_t length = bucket.getBuffer().numel();
    if (known.state == nullptr || known.length != length || known.parameters != parameters) {
      known = {length, std::move(parameters), make()};
    }
    return known.state;
  }

 private:
  struct Known {
    int64_t length = 0;
    std::vector<const void*> parameters;  ///< compared only
    std::shared_ptr<State> state;
  };
  std::vector<Known> known_;
};

}  // namespace muster
