#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/steps/step_recorder.h"
#include "muster/torch/hooks/hooks_base.h"
#include "muster/torch/reducer/failure_agreement.h"
#include "muster/torch/reducer/reducer.h"
#include "muster/torch/reducer/reducer_buckets.h"
#include "muster/torch/reducer/reducer_unused.h"

namespace muster {

/// What a Reducer and its hooks share. A backward goes: prepare_for_backward() arms; each gradient comes to
/// on_gradient(), which moves it into its bucket and begins the reduction of buckets that are full, in their order; the
/// last one queues finish() at the engine, which waits for all and hands the gradients out. In the first backward of a
/// static graph gradients are only counted, until delay_all_reduce() does it all at once.
struct Reducer::Impl : std::enable_shared_from_this<Reducer::Impl> {
  Impl(std::shared_ptr<Group> group, std::vector<at::Tensor> parameters, ReducerOptions options);

  // What the hooks and the engine call: they take the lock.
  void on_gradient(size_t index);
  void finish_locked();
  void delay_all_reduce();

  // With the lock held.
  template <class Body>
  void guarded(Body body);
  template <class Body>
  void within_hook(Body body);
  void accept_gradient(size_t index);
  void count_and_reduce();
  void shadow();
  void expect_gradients();
  void arm(const std::vector<at::Tensor>& outputs);
  void begin_backward();
  void mark_ready(size_t index);
  void mark_dense_ready(Bucket& bucket, size_t position, at::Tensor& gradient);
  void take_sparse(Bucket& bucket, at::Tensor& gradient);
  bool hands_out_views(const Bucket& bucket, size_t position) const;
  void begin_full_buckets();
  void begin_bucket(size_t index);
  void run_hook(size_t index, const std::shared_ptr<Bucket>& bucket);
  void finish();
  void rest();
  void reduce_now(Bucket& bucket);
  void reduce_used();
  void end_bucket(Bucket& bucket);
  void wait_for_hook(const c10::intrusive_ptr<c10::ivalue::Future>& future, const Bucket* bucket);
  at::Tensor result_of(Bucket& bucket);
  void finalize_gradient(Bucket& bucket, size_t position, const at::Tensor* result);
  void record_times();
  Result<> drain();
  void abandon();
  Result<> groups_status() const;
  void check_recovered();
  void reset();

  void verify() const;
  void make_buckets(const BucketPlan& plan);
  void
  allocate_buckets();  ///< to buckets that have none yet: late, as whoever wraps a model first sends it to all ranks
  BucketPlan plan() const;
  std::vector<size_t> limits() const;
  bool rebuild();

  // Whether and how.
  bool searches() const { return options.find_unused_parameters && !options.static_graph; }
  bool counting() const { return options.static_graph && !counted; }
  bool rebuilds() const { return !rebuilt && (options.static_graph || !options.find_unused_parameters); }
  /// A hook of the user's, which takes the elements of a bucket for its gradients and nothing else.
  bool wants_no_gaps() const { return hook && dynamic_cast<const NativeHook*>(hook.get()) == nullptr; }
  bool alone() const { return group->membership().size == 1 && !hook; }  ///< there is nothing to reduce
  bool deferred(const Bucket& bucket) const;
  bool globally_unused(size_t index) const;
  double scale();
  std::string name_of(size_t index) const;
  std::string missing() const;
  void check_finished() const;
  void check_hooked() const;
  [[noreturn]] void throw_marked_twice(size_t index) const;

  std::mutex mutex;
  std::shared_ptr<Group> group;
  std::vector<at::Tensor> parameters;
  ReducerOptions options;
  std::vector<NodePtr> accumulators;                ///< kept: variables hold them weakly
  std::vector<std::pair<size_t, uintptr_t>> hooks;  ///< accumulator, key
  std::unique_ptr<c10d::CommHookInterface> hook;
  std::vector<std::shared_ptr<Group>> hook_groups;  ///< shared with the hook
  std::optional<at::ScalarType> dtype;              ///< of reductions, if not the parameters'
  bool optimizer_in_backward = false;
  bool closed = false;  ///< the Reducer has gone
  std::string error;    ///< the last that left a backward, or that somebody noted

  std::vector<std::shared_ptr<Bucket>> buckets;  ///< shared with callbacks of their reductions
  struct Place {
    size_t bucket = 0, position = 0;
  };
  std::vector<Place> places;  ///< by parameter
  bool rebuilt = false;
  std::vector<size_t> order;  ///< in which gradients came, for the rebuild

  // Of one backward.
  bool armed = false;       ///< hooks take gradients
  bool begun = false;       ///< the first has come
  bool unfinished = false;  ///< a gradient has been taken, and finish() has not run
  bool finish_queued = false;
  std::vector<uint8_t> ready;  ///< by parameter
  size_t ready_count = 0;
  size_t next = 0;                                               ///< the first bucket that has not begun
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;  ///< to be waited for at the end

  // After one that failed, until the next begins.
  bool failed = false;
  std::optional<FailureAgreement> agreement;  ///< none where there is one rank, or a group is dead

  // Unused parameters and static graphs.
  at::Tensor used;  ///< int32 by parameter: here; once reduced, at how many ranks, until the next gradient comes
  bool used_reduced = false;
  std::vector<size_t> unused, unused_before;
  bool searched = false, graph_is_static = true;
  bool counted = false;  ///< the first backward of a static graph is over
  bool delay_queued = false;
  std::vector<int> calls, calls_left;  ///< static graph: of the hook, by parameter

  // Join.
  c10::intrusive_ptr<c10d::Work> forward_work;
  bool divide_by_initial = true;
  double factor = 1;  ///< makes the next average one over those that have data

  TimePoint forward_time, backward_time, waited_time;
  TimePoint handed_back;      ///< autograd goes on after the last gradient
  bool others_go_on = false;  ///< in the last step autograd had more to do then: layers that are not this model's
  BackwardTimes times;
  StepRecorder steps{group->membership()};
};

}  // namespace muster
