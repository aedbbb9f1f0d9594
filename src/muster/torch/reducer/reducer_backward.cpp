// The phases of a backward: see reducer_impl.h.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <numeric>

#include "muster/base/check.h"
#include "muster/torch/exception.h"
#include "muster/torch/reducer/reducer_impl.h"

namespace muster {
namespace {

void queue_at_end(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

std::vector<size_t> backwards(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.rbegin(), order.rend(), size_t{0});
  return order;
}

}  // namespace

Reducer::Impl::Impl(std::shared_ptr<Group> its_group, std::vector<at::Tensor> its_parameters,
                    ReducerOptions its_options)
    : ReducerContext{std::move(its_group), std::move(its_parameters), std::move(its_options)} {
  TORCH_CHECK(!parameters.empty(), "a reducer needs at least one parameter that requires a gradient");
  TORCH_CHECK(options.sparse.empty() || options.sparse.size() == parameters.size(),
              "options.sparse must have an entry for each of ", parameters.size(), " parameters");
  if (options.verify) verify_model();
  options.model_parameters.clear();
  options.model_buffers.clear();
  // Gradients are likely to arrive from the last parameter to the first.
  build_buckets(plan_buckets(*this, backwards(parameters.size())));
}

void Reducer::Impl::build_buckets(const BucketPlan& plan) {
  buckets.build(plan, reductions.aligns_gradients());
  clock.set_plan(options.names, plan);
}

bool Reducer::Impl::rebuild_buckets() {
  check_finished();
  if (!will_rebuild() || !arrivals.has_order()) return false;
  std::vector<int64_t> agreed(arrivals.order().begin(), arrivals.order().end());
  const ProfilerEvent event("muster:broadcast", {});
  value_or_throw(group->broadcast({agreed.data(), agreed.size(), Dtype::kInt64}, 0).wait());
  const BucketPlan plan = plan_buckets(*this, std::vector<size_t>(agreed.begin(), agreed.end()));
  if (plan != buckets.plan()) build_buckets(plan);
  rebuilt = true;
  return true;
}

/// Throws unless all ranks may begin another backward after one that failed here.
void Reducer::Impl::arm(bool record_order) {
  if (failed()) {
    value_or_throw(reductions.groups_status());
    if (agreement) agreement->confirm(*group);
    agreement.reset();
  }
  phase = Phase::kArmed;
  arrivals.begin_backward(record_order);
  buckets.begin_backward();
  reductions.begin_backward();
}

void Reducer::Impl::prepare(const std::vector<at::Tensor>& outputs) {
  hooks.check(*this);
  arm(will_rebuild() && !in_first_static_iteration());
  static_graph.begin_backward();
  if (finds_unused()) {
    RECORD_USER_SCOPE("muster:search_unused_parameters");
    used.set_unused(find_unused(outputs, hooks.accumulators()));
  }
  if (in_first_static_iteration()) queue_static_reduction(outputs);
}

/// Queues the reduction when backward begins, so that the callback belongs to the outermost of nested backwards.
void Reducer::Impl::queue_static_reduction(const std::vector<at::Tensor>& outputs) {
  const auto queued = std::make_shared<bool>(false);  // true once the hook of one output has queued it
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    output.register_hook([weak = weak_from_this(), queued](const at::Tensor&) {
      const auto self = weak.lock();
      if (!self || std::exchange(*queued, true)) return;
      queue_at_end([self] { self->reduce_first_static_iteration(); });
    });
  }
}

/// Runs a part of a backward without recording it for a second derivative. A failure ends the backward.
void Reducer::Impl::guarded(c10::function_ref<void()> body) {
  const at::NoGradGuard no_grad;
  try {
    body();
  } catch (const ErrorException& failure) {
    abandon(Phase::kFailed);
    error = failure.what_without_backtrace();
    if (options.on_failure) options.on_failure(failure);
    throw;
  } catch (const c10::Error& failure) {
    abandon(Phase::kMisused);
    error = failure.what_without_backtrace();
    throw;
  } catch (...) {
    abandon(Phase::kMisused);
    throw;
  }
}

/// Ends a backward that failed, so that it cannot disturb a later one. At this rank, submitted operations still write
/// to gradients: it waits for them. Another rank may wait for reductions that this rank has not submitted: the ranks
/// compare the points at which they failed, or, if an operation does not end, this rank aborts the group.
void Reducer::Impl::abandon(Phase outcome) {
  const bool unfinished = (phase == Phase::kReducing || phase == Phase::kWaiting) && arrivals.any();
  phase = unfinished ? outcome : Phase::kFailed;
  arrivals.drop_order();
  const Result<> drained = reductions.drain();
  if (size() == 1 || !reductions.groups_status()) return;
  if (!drained) return abort(drained.error());
  if (device_group() != nullptr) {  // kernels of other ranks may wait for reductions that this rank has not submitted
    return abort({ErrorCode::kAborted, "a backward failed at this rank", rank()});
  }
  agreement.emplace(*group, FailurePoint{clock.last().iteration, reductions.begun()});
}

void Reducer::Impl::on_gradient(size_t index) {
  const std::lock_guard lock(mutex);
  if (phase != Phase::kClosed) guarded([&] { accept_gradient(index); });
}

void Reducer::Impl::accept_gradient(size_t index) {
  if (finds_unused() || in_first_static_iteration()) {
    if (finds_unused() && used.reduced()) used.clear_counts();  // they are those of the last backward
    if (parameters[index].grad().defined()) used.mark_used(index);
  }
  if (phase == Phase::kArmed) begin_reducing();
  if (phase != Phase::kReducing && phase != Phase::kWaiting) return;
  if (in_first_static_iteration()) return static_graph.count(index);
  if (options.static_graph) {
    TORCH_CHECK(static_graph.calls_left(index) > 0, "Your training graph has changed in this iteration: parameter ",
                name_of(index), " got more gradients than in the first one, which static_graph does not allow");
    if (!static_graph.take_call(index)) return;
  }
  mark_ready(index);
  if (!reductions.all_begun() || phase == Phase::kWaiting) return;
  phase = Phase::kWaiting;
  queue_at_end([self = shared_from_this()] { self->on_backward_end(); });
  clock.pause();
}

/// The first gradient has arrived. Unused parameters count as ready at once.
void Reducer::Impl::begin_reducing() {
  phase = Phase::kReducing;
  clock.first_gradient();
  if (!reductions.is_single_rank()) buckets.allocate();
  if (in_first_static_iteration()) return;
  for (const size_t index : used.unused()) mark_ready(index);
}

void Reducer::Impl::mark_ready(size_t index) {
  if (!arrivals.mark(index)) throw_marked_twice(index);
  if (arrivals.all()) clock.last_gradient();
  Bucket& bucket = buckets.store(index);
  if (bucket.pending > 0) return;
  bucket.skipped = options.skip_all_reduce_unused_parameters && used.all_unused(bucket.parameters);
  try {
    // Reduces the last bucket on this thread, which waits for it anyway, unless autograd has more to do.
    reductions.submit_full(/*last_inline=*/!clock.engine_continues());
  } catch (...) {
    phase = Phase::kFailed;  // the hook or the group failed, whatever the type of the exception
    throw;
  }
}

void Reducer::Impl::reduce_first_static_iteration() {
  const std::lock_guard lock(mutex);
  if (phase != Phase::kReducing || !in_first_static_iteration()) return;
  guarded([&] {
    used.set_unused(static_graph.finish_counting());
    for (size_t i = 0; i < parameters.size(); ++i) mark_ready(i);
    finish();
  });
}

void Reducer::Impl::shadow_backward() {
  check_finished();
  // In the first backward of a static graph the other ranks only count. They record the order in the next one.
  arm(will_rebuild() && (!options.static_graph || used.reduced()));
  if (finds_unused() || !used.reduced()) used.clear_counts();
  phase = Phase::kReducing;
  clock.first_gradient();
  for (at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
  if (!reductions.is_single_rank()) buckets.allocate();
  for (const size_t index : backwards(parameters.size())) mark_ready(index);
  finish();
}

void Reducer::Impl::on_backward_end() {
  const std::lock_guard lock(mutex);
  if (phase != Phase::kWaiting) return;
  clock.resume();
  guarded([&] { finish(); });
}

void Reducer::Impl::finish() {
  MUSTER_CHECK(reductions.all_begun(), "a backward ends with every bucket begun");
  phase = Phase::kFinishing;
  reductions.reduce_deferred();
  if (finds_unused() || (options.static_graph && !used.reduced())) {
    reductions.wait_for_hooks();
    used.all_reduce_counts(*group);
  }
  for (const auto& bucket : buckets.all()) {
    if (bucket->skipped) continue;
    const at::Tensor result = reductions.result_of(*bucket);
    if (!options.optimizer_in_backward) buckets.hand_out(*bucket, result, used);
  }
  reductions.finish();
  clock.end(buckets);
  phase = Phase::kIdle;
}

void Reducer::Impl::reset() {
  static_cast<void>(reductions.drain());
  phase = failed() ? Phase::kFailed : Phase::kIdle;
  rebuilt = false;
  arrivals.begin_backward(false);
  used.reset();
  static_graph.reset();
  buckets.begin_backward();
  reductions.begin_backward();
}

}  // namespace muster
