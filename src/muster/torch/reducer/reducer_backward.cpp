// The run of a backward: see reducer_impl.h.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <algorithm>

#include "muster/base/check.h"
#include "muster/torch/c10d/sparse.h"
#include "muster/torch/exception.h"
#include "muster/torch/hooks/hooks_base.h"
#include "muster/torch/reducer/reducer_impl.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

void queue_at_end(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace

void Reducer::Impl::expect_gradients() {
  check_recovered();
  armed = true;
  begun = finish_queued = delay_queued = false;
  next = ready_count = 0;
  std::fill(ready.begin(), ready.end(), 0);
  for (const auto& bucket : buckets) bucket->begin_backward();
}

void Reducer::Impl::arm(const std::vector<at::Tensor>& outputs) {
  check_hooked();
  expect_gradients();
  if (options.static_graph) calls_left = calls;
  if (searches()) {
    RECORD_USER_SCOPE("muster:search_unused_parameters");
    unused = find_unused(outputs, accumulators);
    graph_is_static = graph_is_static && (!searched || unused == unused_before);
    unused_before = unused;
    searched = true;
  }
  if (!counting()) return;
  // At the start of backward, so that it is the outermost one that ends with the reduction.
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    output.register_hook([weak = weak_from_this()](const at::Tensor&) {
      const auto self = weak.lock();
      if (!self || std::exchange(self->delay_queued, true)) return;
      queue_at_end([self] { self->delay_all_reduce(); });
    });
  }
}

/// Runs a part of a backward: without recording it, also where the backward is to be differentiated.
template <class Body>
void Reducer::Impl::guarded(Body body) {
  const at::NoGradGuard no_grad;
  try {
    body();
  } catch (const ErrorException& failure) {
    rest();
    abandon();
    error = failure.what_without_backtrace();
    if (options.on_failure) options.on_failure(failure);
    throw;
  } catch (const c10::Error& wrong_use) {
    abandon();
    error = wrong_use.what_without_backtrace();
    throw;
  } catch (...) {
    abandon();
    throw;
  }
}

/// Runs what a hook may fail in. A callback of Python's has what failed in its group as an error of another type, if at
/// all: where a group is dead, its own error is the reason.
template <class Body>
void Reducer::Impl::within_hook(Body body) {
  try {
    body();
  } catch (const ErrorException&) {
    throw;
  } catch (...) {
    value_or_throw(groups_status());
    throw;
  }
}

void Reducer::Impl::on_gradient(size_t index) {
  const std::lock_guard lock(mutex);
  if (!closed) guarded([&] { accept_gradient(index); });
}

void Reducer::Impl::accept_gradient(size_t index) {
  if (searches() && std::exchange(used_reduced, false)) used.zero_();  // the last backward's
  if ((searches() || counting()) && parameters[index].grad().defined()) used.mutable_data_ptr<int>()[index] = 1;
  if (!armed) return;
  if (!begun) begin_backward();
  if (counting()) {
    ++calls[index];
    return;
  }
  if (options.static_graph) {
    TORCH_CHECK(calls_left[index] > 0, "Your training graph has changed in this iteration: parameter ", name_of(index),
                " got more gradients than in the first one, which static_graph does not allow");
    if (--calls_left[index] > 0) return;
  }
  if (rebuilds()) order.push_back(index);
  mark_ready(index);
  if (next == buckets.size() && !std::exchange(finish_queued, true)) {
    queue_at_end([self = shared_from_this()] { self->finish_locked(); });
    handed_back = steady_clock().now();
  }
}

/// The first gradient has come: those that will not come are there, too.
void Reducer::Impl::begin_backward() {
  begun = true;
  backward_time = steady_clock().now();
  allocate_buckets();
  if (counting()) return;
  if (rebuilds()) order.clear();
  for (const size_t index : unused) {
    if (rebuilds()) order.push_back(index);
    mark_ready(index);
  }
}

void Reducer::Impl::mark_ready(size_t index) {
  if (ready[index]) throw_marked_twice(index);
  ready[index] = 1;
  if (++ready_count == ready.size()) waited_time = steady_clock().now();
  unfinished = true;
  const Place& place = places[index];
  Bucket& bucket = *buckets[place.bucket];
  if (bucket.pending == bucket.parameters.size()) bucket.times.first_ready = steady_clock().now();
  at::Tensor& gradient = parameters[index].mutable_grad();
  if (bucket.sparse) {
    take_sparse(bucket, gradient);
  } else {
    mark_dense_ready(bucket, place.position, gradient);
  }
  if (--bucket.pending > 0) return;
  bucket.times.ready = steady_clock().now();
  bucket.times.last_parameter = index;
  begin_full_buckets();
}

void Reducer::Impl::mark_dense_ready(Bucket& bucket, size_t position, at::Tensor& gradient) {
  if (alone()) return;
  at::Tensor& view = bucket.view(position);
  if (!gradient.defined()) {
    view.zero_();
    return;
  }
  if (gradient.is_same(view)) return;
  const size_t index = bucket.parameters[position];
  TORCH_CHECK(gradient.layout() == c10::kStrided, "Expected a dense gradient of parameter ", name_of(index), ", got a ",
              gradient.layout(), " one: say so when the reducer is made");
  TORCH_CHECK(dtype || gradient.scalar_type() == view.scalar_type(), "Expected a gradient of ", view.scalar_type(),
              " for parameter ", name_of(index), ", got ", gradient.scalar_type(),
              ": a parameter's dtype may not change after the reducer is made");
  if (!gradient.is_alias_of(view) || gradient.const_data_ptr() != view.const_data_ptr()) copy_gradient(view, gradient);
  if (hands_out_views(bucket, position)) gradient = view;
}

/// Where the reduction has another dtype than the parameter, the gradient has memory of its own.
bool Reducer::Impl::hands_out_views(const Bucket& bucket, size_t position) const {
  return options.gradient_as_bucket_view && bucket.flat.scalar_type() == bucket.variables[position].scalar_type();
}

void Reducer::Impl::take_sparse(Bucket& bucket, at::Tensor& gradient) {
  const at::Tensor& parameter = bucket.variables.front();
  if (!gradient.defined()) {
    bucket.flat = empty_sparse_like(parameter);
    return;
  }
  TORCH_CHECK(gradient.is_sparse(), "Expected variable to have sparse gradient: parameter ",
              name_of(bucket.parameters.front()), " has a dense one");
  bucket.flat = gradient;
}

/// Buckets that the group's queue cannot reduce: they wait for the end of backward.
bool Reducer::Impl::deferred(const Bucket& bucket) const {
  return !hook && !alone() && (bucket.sparse || !bucket.flat.device().is_cpu());
}

/// Factor that makes an average over the group's ranks one over those that have data. Where torch's Python code counts
/// them, a hook of Python's divides as it likes, as with torch's reducer.
double Reducer::Impl::scale() {
  const bool ours = !hook || dynamic_cast<const NativeHook*>(hook.get()) != nullptr;
  if (!forward_work || divide_by_initial || !ours) return factor;
  forward_work->wait();
  return group->membership().size / forward_work->result().front().item<double>();
}

void Reducer::Impl::begin_full_buckets() {
  while (next < buckets.size() && buckets[next]->pending == 0) begin_bucket(next++);
}

void Reducer::Impl::begin_bucket(size_t index) {
  const std::shared_ptr<Bucket>& bucket = buckets[index];
  const auto is_unused = [&](size_t i) { return std::binary_search(unused.begin(), unused.end(), i); };
  if (options.skip_all_reduce_unused_parameters &&
      std::all_of(bucket->parameters.begin(), bucket->parameters.end(), is_unused)) {
    bucket->skipped = true;
    return;
  }
  if (alone()) return;
  if (const double by = scale(); by != 1) bucket->flat.mul_(by);
  if (hook) {
    run_hook(index, bucket);
    return;
  }
  if (deferred(*bucket)) return;
  bucket->times.begun = steady_clock().now();
  bucket->event.emplace("muster:all_reduce", bucket->flat);
  // The last one in this thread, if it has nothing left to do but wait for it.
  const bool here = index + 1 == buckets.size() && !others_go_on;
  bucket->work = group->all_reduce(value_or_throw(view_of(bucket->flat)), ReduceOp::kAverage, {.async = !here});
  bucket->work->on_done([bucket](const Result<>&) { bucket->ended = steady_clock().now().ns; });
}

void Reducer::Impl::run_hook(size_t index, const std::shared_ptr<Bucket>& bucket) {
  bucket->times.begun = steady_clock().now();
  c10d::GradBucket grad_bucket = bucket->grad_bucket(index, buckets.size(), bucket->flat);
  try {
    within_hook([&] { bucket->future = hook->runHook(grad_bucket); });
  } catch (...) {
    rest();
    throw;
  }
  bucket->future->addCallback([bucket](c10::ivalue::Future&) { bucket->ended = steady_clock().now().ns; });
}

void Reducer::Impl::delay_all_reduce() {
  const std::lock_guard lock(mutex);
  if (closed || !armed || !begun || (options.static_graph && counted)) return;
  guarded([&] { count_and_reduce(); });
}

void Reducer::Impl::count_and_reduce() {
  if (options.static_graph) {
    counted = true;
    unused.clear();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (calls[i] == 0) unused.push_back(i);
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!ready[i]) mark_ready(i);
  }
  if (!finish_queued) finish();
}

void Reducer::Impl::shadow() {
  check_finished();
  // In the first backward of a static graph the others only count: the order in which theirs come is that of the next.
  const bool ordered = rebuilds() && (!options.static_graph || used_reduced);
  expect_gradients();
  if (searches()) used_reduced = false;
  if (!used_reduced) used.zero_();
  begun = true;
  backward_time = steady_clock().now();
  for (at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
  allocate_buckets();
  order.clear();
  for (size_t i = parameters.size(); i-- > 0;) {
    if (ordered) order.push_back(i);
    mark_ready(i);
  }
  finish();
}

/// No backward runs: what comes next is not to fail for the end of this one.
void Reducer::Impl::rest() { armed = unfinished = finish_queued = false; }

void Reducer::Impl::finish_locked() {
  constexpr Duration kWorthAThread = std::chrono::microseconds(100);  // several times what an async call costs
  const std::lock_guard lock(mutex);
  if (closed || !armed) return;
  // Autograd may have gone on with layers outside the model: backward has not waited for reductions in that time.
  const Duration elsewhere = steady_clock().now() - handed_back;
  others_go_on = elsewhere > kWorthAThread;
  waited_time = waited_time + elsewhere;
  guarded([&] { finish(); });
}

void Reducer::Impl::finish() {
  MUSTER_CHECK(next == buckets.size(), "a backward ends with every bucket begun");
  rest();
  if (options.static_graph && rebuilds() && !order.empty()) {
    // Those that never came are behind all others.
    for (const size_t index : unused) {
      if (std::find(order.begin(), order.end(), index) == order.end()) order.push_back(index);
    }
  }
  for (const auto& bucket : buckets) {
    if (deferred(*bucket) && !bucket->skipped) reduce_now(*bucket);
  }
  if (searches() || (options.static_graph && !used_reduced)) {
    for (const auto& bucket : buckets) {
      if (bucket->future) wait_for_hook(bucket->future, bucket.get());  // hooks may begin operations until then
    }
    reduce_used();
  }
  for (const auto& bucket : buckets) {
    if (!bucket->skipped) end_bucket(*bucket);
  }
  for (const auto& future : futures) {
    wait_for_hook(future, nullptr);
    within_hook([&] { future->waitAndThrow(); });
  }
  futures.clear();
  forward_work.reset();
  factor = 1;
  record_times();
}

void Reducer::Impl::reduce_now(Bucket& bucket) {
  bucket.times.begun = steady_clock().now();
  if (bucket.sparse) {
    at::Tensor sum = sum_sparse(*group, bucket.flat);
    bucket.flat.copy_(sum.div_(group->membership().size));
  } else {
    const at::Tensor host = bucket.flat.cpu();
    value_or_throw(group->all_reduce(value_or_throw(view_of(host)), ReduceOp::kAverage).wait());
    bucket.flat.copy_(host);
  }
}

void Reducer::Impl::reduce_used() {
  const ProfilerEvent event("muster:all_reduce", used);
  value_or_throw(group->all_reduce(value_or_throw(view_of(used)), ReduceOp::kSum).wait());
  used_reduced = true;
}

/// Waits for the reduction, and gives its result to the parameters.
void Reducer::Impl::end_bucket(Bucket& bucket) {
  const at::Tensor result = result_of(bucket);
  const int64_t ended = bucket.ended;  // as its thread has noted it, if it has yet
  bucket.times.ended = ended >= bucket.times.begun.ns && ended != 0 ? TimePoint{ended} : steady_clock().now();
  if (optimizer_in_backward) return;
  if (bucket.sparse) {
    at::Tensor& gradient = parameters[bucket.parameters.front()].mutable_grad();
    if (globally_unused(bucket.parameters.front())) return;
    if (!gradient.defined()) {
      gradient = result;
    } else if (!gradient.is_same(result)) {
      gradient.copy_(result);
    }
    return;
  }
  const at::Tensor* apart = nullptr;
  if (!alone() && !result.is_alias_of(bucket.flat)) {
    if (result.scalar_type() == bucket.flat.scalar_type()) {
      bucket.flat.copy_(result.view(-1));
    } else {
      apart = &result;  // gradients may have the dtype of the result
    }
  }
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    if (!globally_unused(bucket.parameters[i])) finalize_gradient(bucket, i, apart);
  }
}

/// Waits until the future is complete, well or not. A hook that waits for operations has their deadlines; for any other
/// the group's timeout is the deadline.
void Reducer::Impl::wait_for_hook(const c10::intrusive_ptr<c10::ivalue::Future>& future, const Bucket* bucket) {
  if (wait_until(future, Deadline::after(group->timeout()))) return;
  std::string which = " for the end of backward";
  if (bucket != nullptr) which = c10::str(" of bucket ", places[bucket->parameters.front()].bucket);
  const Error error{ErrorCode::kTimeout,
                    c10::str("the communication hook's future", which, " is not complete after ",
                             std::chrono::duration<double>(group->timeout()).count(), " s, the group's timeout"),
                    group->membership().rank};
  group->abort(error);  // the other ranks would wait for this one
  throw_error(error);
}

at::Tensor Reducer::Impl::result_of(Bucket& bucket) {
  if (bucket.work) value_or_throw(bucket.work->wait());
  bucket.event.reset();
  if (!bucket.future) return bucket.flat;
  wait_for_hook(bucket.future, &bucket);
  within_hook([&] { bucket.future->waitAndThrow(); });
  at::Tensor result = hook->parseHookResult(bucket.future->value());
  TORCH_CHECK(bucket.sparse || result.numel() == bucket.flat.numel(), "a communication hook returned ", result.numel(),
              " elements for a bucket of ", bucket.flat.numel());
  return result;
}

bool Reducer::Impl::globally_unused(size_t index) const {
  return used_reduced && used.const_data_ptr<int>()[index] == 0;
}

void Reducer::Impl::finalize_gradient(Bucket& bucket, size_t position, const at::Tensor* result) {
  at::Tensor& variable = parameters[bucket.parameters[position]];
  at::Tensor& gradient = variable.mutable_grad();
  if (alone()) {
    if (!gradient.defined()) gradient = at::zeros_like(variable);
    return;
  }
  at::Tensor& view = bucket.view(position);
  if (gradient.is_same(view) && result == nullptr) return;
  if (hands_out_views(bucket, position) && result == nullptr) {
    gradient = view;
    return;
  }
  const at::Tensor source = result != nullptr ? bucket.view_in(*result, position) : view;
  if (gradient.defined()) {
    copy_gradient(gradient, source);
  } else {
    gradient = torch::autograd::utils::clone_obey_contract(source.to(variable.scalar_type()), variable);
  }
}

void Reducer::Impl::record_times() {
  times.forward = forward_time;
  times.backward = backward_time;
  times.waited = waited_time;
  std::vector<size_t> bytes;
  for (size_t i = 0; i < buckets.size(); ++i) {
    times.buckets[i] = buckets[i]->times;
    bytes.push_back(buckets[i]->bytes());
  }
  times.ended = steady_clock().now();
  ++times.iteration;
  steps.add(times, bytes);
}

}  // namespace muster
