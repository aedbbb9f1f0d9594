#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "muster/torch/reducer/autograd_hooks.h"
#include "muster/torch/reducer/failure_agreement.h"
#include "muster/torch/reducer/reducer.h"
#include "muster/torch/reducer/reducer_buckets.h"
#include "muster/torch/reducer/reducer_clock.h"
#include "muster/torch/reducer/reducer_parts.h"
#include "muster/torch/reducer/reducer_unused.h"
#include "muster/torch/reducer/reduction_queue.h"

namespace muster {

/// The state machine of a Reducer, shared with its autograd hooks. The hooks and most functions of Reducer hold
/// `mutex`. The parts do not know the phases. Parts that need no ranks and no autograd are tested without them.
///
///   kIdle      -> kArmed      prepare_for_backward()
///   kArmed     -> kReducing   the first gradient arrives
///   kReducing  -> kWaiting    all buckets were submitted; finish() is queued at autograd's engine
///   kWaiting   -> kFinishing  the engine is done: wait for the results, hand out the gradients
///   kReducing  -> kFinishing  the same without the engine: first backward of a static graph, shadow_backward()
///   kFinishing -> kIdle
///   any        -> kFailed     a group or a hook failed; the next backward begins once all ranks agree on that
///   kReducing, kWaiting -> kMisused   wrong use; the next forward says that this backward did not finish
///   any        -> kClosed     the Reducer is destroyed
struct Reducer::Impl : ReducerContext, std::enable_shared_from_this<Reducer::Impl> {
  enum class Phase : uint8_t { kIdle, kArmed, kReducing, kWaiting, kFinishing, kFailed, kMisused, kClosed };

  Impl(std::shared_ptr<Group> group, std::vector<at::Tensor> parameters, ReducerOptions options);

  // Called by hooks and by autograd's engine. These three take the lock.
  void on_gradient(size_t index);
  void on_backward_end();
  void reduce_first_static_iteration();

  // With the lock held.
  void guarded(c10::function_ref<void()> body);
  void prepare(const std::vector<at::Tensor>& outputs);
  void arm(bool record_order);
  void queue_static_reduction(const std::vector<at::Tensor>& outputs);
  void accept_gradient(size_t index);
  void begin_reducing();
  void mark_ready(size_t index);
  void finish();
  void shadow_backward();
  void abandon(Phase outcome);
  void reset();
  bool rebuild_buckets();
  void build_buckets(const BucketPlan& plan);
  void check_finished() const;
  [[noreturn]] void throw_marked_twice(size_t index) const;

  bool finds_unused() const { return options.find_unused_parameters && !options.static_graph; }
  bool in_first_static_iteration() const { return options.static_graph && static_graph.counting(); }
  /// True if the order of gradients is still to be recorded. That order is stable without find_unused_parameters, or in
  /// a static graph.
  bool will_rebuild() const { return !rebuilt && (options.static_graph || !options.find_unused_parameters); }
  bool failed() const { return phase == Phase::kFailed || phase == Phase::kMisused; }

  std::mutex mutex;
  Phase phase = Phase::kIdle;
  bool rebuilt = false;
  AutogradHooks hooks;
  GradientBuckets buckets{*this};
  ReductionQueue reductions{*this, buckets};
  GradientArrivals arrivals{parameters.size()};
  UsedParameters used{parameters.size()};
  StaticGraph static_graph{parameters.size()};
  BackwardClock clock{group->membership()};
  std::optional<FailureAgreement> agreement;  ///< after kFailed; none at a single rank or in a dead group
  std::string error;                          ///< the last error of a backward, or the last one noted
};

}  // namespace muster
