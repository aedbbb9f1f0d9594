#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "muster/torch/hooks.h"
#include "muster/torch/hooks/hooks_sequencer.h"

namespace muster {

using HookFuture = c10::intrusive_ptr<c10::ivalue::Future>;

HookFuture new_future();
/// Returns false if the future is not complete when the deadline comes.
bool wait_until(const HookFuture& future, const Deadline& deadline);
/// As bucket_of(), for gradients that begin at `offsets` in `buffer`, in elements. There may be gaps between them.
c10d::GradBucket bucket_at(size_t index, size_t count, const at::Tensor& buffer, std::vector<size_t> offsets,
                           const std::vector<at::Tensor>& parameters);
/// Completes the future with `value`, or with the error of `result`.
void complete(const HookFuture& future, const Result<>& result, c10::IValue value);

/// Base class: averages buckets that are not compressed, and completes futures.
class NativeHook : public c10d::CppCommHookInterface<HookGroups> {
 public:
  explicit NativeHook(HookGroups groups);
  HookFuture runHook(c10d::GradBucket& bucket) final;

 protected:
  /// Reduces a float32 bucket; called only if there are several ranks.
  virtual HookFuture reduce(c10d::GradBucket& bucket) = 0;
  HookFuture average(const at::Tensor& buffer) const;
  /// A future that completes with `buffer` when `work` has succeeded and `finish` has run. `finish` runs on the thread
  /// that finishes the work.
  template <class Finish>
  static HookFuture when_done(const Work& work, const at::Tensor& buffer, Finish finish) {
    const HookFuture future = new_future();
    work.on_done([future, buffer, finish](const Result<>& result) {
      if (result) finish();
      complete(future, result, buffer);
    });
    return future;
  }

  Group& group() const { return *state_.group; }
  const std::shared_ptr<Group>& secondary() const { return state_.secondary_group; }
  Rank rank() const { return group().membership().rank; }
  int size() const { return group().membership().size; }
  /// A message buffer of zeros, in memory that the ranks of this host share if there is any.
  at::Tensor message(size_t count, at::ScalarType dtype) const;
};

/// Base class of hooks whose reductions have a second phase, which runs over the secondary group.
class TwoPhaseHook : public NativeHook {
 public:
  explicit TwoPhaseHook(HookGroups groups);
  /// Aborts reductions that are not complete, here and at the other ranks.
  ~TwoPhaseHook() override;

 protected:
  /// Runs `phase` with the result of `first` on the sequencer's thread, after all phases that were queued earlier. The
  /// thread may outlive this hook. This phase, or a later one, completes `future`.
  template <class Phase>
  void after(const Work& first, const HookFuture& future, Phase phase) {
    last_ = future;
    sequencer_.then(first, [group = secondary(), phase](const Result<>& result) {
      if (!result) group->abort(result.error());  // the other ranks may wait in that group for the second phase
      phase(result);
    });
  }
  /// The usual second phase: `pack` makes the second message from the result of the first one, `submit` sends it over
  /// the secondary group, and `unpack` writes the average to `buffer`.
  template <class Pack, class Submit, class Unpack>
  HookFuture then(const Work& first, const at::Tensor& buffer, Pack pack, Submit submit, Unpack unpack) {
    const HookFuture future = new_future();
    after(first, future, [group = secondary(), future, buffer, pack, submit, unpack](Result<> result) {
      if (result) {
        pack();
        result = submit(*group).wait();
        if (result) unpack();
      }
      complete(future, result, buffer);
    });
    return future;
  }

 private:
  HookSequencer sequencer_;
  HookFuture last_;  ///< completes after all others, because phases run in order
};

/// Keeps a hook's State of each bucket between steps. A bucket that holds other parameters gets a new State.
template <class State>
class BucketStates {
 public:
  /// The bucket's state, shared with the operations that use it.
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
    std::vector<const void*> parameters;  ///< addresses that are only compared
    std::shared_ptr<State> state;
  };
  std::vector<Known> known_;
};

}  // namespace muster
