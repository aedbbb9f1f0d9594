#include "muster/torch/reducer/reducer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <numeric>

#include "muster/torch/c10d/sparse.h"
#include "muster/torch/c10d/work.h"
#include "muster/torch/exception.h"
#include "muster/torch/hooks/hooks_base.h"
#include "muster/torch/reducer/reducer_impl.h"
#include "muster/torch/reducer/reducer_verify.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;
using torch::autograd::utils::LambdaPostHook;

std::unique_ptr<LambdaPostHook> post_hook(std::function<void()> call) {
  using List = std::vector<at::Tensor>;
  return std::make_unique<LambdaPostHook>(
      [call = std::move(call)](const List& outputs, const List&) {
        call();
        return outputs;
      },
      [](auto&) {
        TORCH_CHECK(false,
                    "compiled autograd cannot trace the reducer's hooks; set "
                    "torch._dynamo.config.optimize_ddp = \"python_reducer\", or compile the forward only");
      });
}

}  // namespace

Reducer::Impl::Impl(std::shared_ptr<Group> its_group, std::vector<at::Tensor> its_parameters,
                    ReducerOptions its_options)
    : group(std::move(its_group)), parameters(std::move(its_parameters)), options(std::move(its_options)) {
  TORCH_CHECK(!parameters.empty(), "a reducer needs at least one parameter that requires a gradient");
  TORCH_CHECK(options.sparse.empty() || options.sparse.size() == parameters.size(),
              "options.sparse must have an entry for each of ", parameters.size(), " parameters");
  if (options.verify) verify();
  options.model_parameters.clear();
  options.model_buffers.clear();
  const size_t count = parameters.size();
  ready.resize(count);
  calls.resize(count);
  calls_left.resize(count);
  places.resize(count);
  used = at::zeros({static_cast<int64_t>(count)}, at::kInt);
  make_buckets(plan());
}

void Reducer::Impl::verify() const {
  if (!options.model_parameters.empty()) {
    return verify_model(*group, options.model_parameters, options.model_buffers);
  }
  NamedTensors own;
  for (size_t i = 0; i < parameters.size(); ++i) {
    own.emplace_back(i < options.names.size() ? options.names[i] : "", parameters[i]);
  }
  verify_model(*group, own, {});
}

std::vector<size_t> Reducer::Impl::limits() const {
  if (!options.bucket_bytes_list.empty()) return options.bucket_bytes_list;
  return {options.first_bucket_bytes, options.bucket_bytes};
}

/// In the order in which gradients came, or else in the one in which they are likely to come: from the back.
BucketPlan Reducer::Impl::plan() const {
  if (order.size() == parameters.size()) return plan_buckets(parameters, order, options.sparse, limits());
  std::vector<size_t> backwards(parameters.size());
  std::iota(backwards.rbegin(), backwards.rend(), size_t{0});
  return plan_buckets(parameters, backwards, options.sparse, limits());
}

void Reducer::Impl::make_buckets(const BucketPlan& plan) {
  buckets.clear();  // first: their memory may serve the new ones
  for (const auto& members : plan) {
    for (size_t position = 0; position < members.size(); ++position) {
      places[members[position]] = {buckets.size(), position};
    }
    const bool sparse = !options.sparse.empty() && options.sparse[members.front()];
    buckets.push_back(make_bucket(parameters, members, sparse, !wants_no_gaps()));
    buckets.back()->begin_backward();
  }
  times.buckets.assign(buckets.size(), {});
  steps.set_plan(options.names, plan);
}

void Reducer::Impl::allocate_buckets() {
  for (const auto& bucket : buckets) {
    if (bucket->sparse || bucket->flat.defined() || alone()) continue;
    bucket->flat = make_flat(*group, *bucket, dtype);
    if (!options.gradient_as_bucket_view) continue;
    for (size_t position = 0; position < bucket->parameters.size(); ++position) {
      at::Tensor& gradient = parameters[bucket->parameters[position]].mutable_grad();
      if (gradient.defined()) mark_dense_ready(*bucket, position, gradient);
    }
  }
}

bool Reducer::Impl::rebuild() {
  check_finished();
  if (!rebuilds() || order.size() != parameters.size()) return false;
  std::vector<int64_t> agreed(order.begin(), order.end());
  const ProfilerEvent event("muster:broadcast", {});
  value_or_throw(group->broadcast({agreed.data(), agreed.size(), Dtype::kInt64}, 0).wait());
  order.assign(agreed.begin(), agreed.end());
  const BucketPlan better = plan();
  bool differs = better.size() != buckets.size();
  for (size_t i = 0; !differs && i < better.size(); ++i) differs = better[i] != buckets[i]->parameters;
  if (differs) make_buckets(better);
  rebuilt = true;
  order.clear();
  return true;
}

/// Waits for what the last backward began, which may write to gradients. Fails if a future of a hook is not complete
/// within the group's timeout.
Result<> Reducer::Impl::drain() {
  constexpr Duration kGrace = std::chrono::seconds(10);  // in a dead group nothing goes on for long
  const Deadline deadline =
      Deadline::after(group->status() ? group->timeout() : std::min<Duration>(kGrace, group->timeout()));
  bool complete = true;
  for (const auto& bucket : buckets) {
    if (bucket->work) static_cast<void>(bucket->work->wait());
    if (bucket->future) complete = wait_until(bucket->future, deadline) && complete;
  }
  for (const auto& future : std::exchange(futures, {})) complete = wait_until(future, deadline) && complete;
  if (complete) return {};
  return fail(ErrorCode::kTimeout, "a backward failed, and a communication hook's future that it left never completes",
              group->membership().rank);
}

/// A backward has failed. No later one may meet what is left of it: at this rank, where its operations still write to
/// gradients, or at another, which may be waiting for reductions that this rank has not begun.
void Reducer::Impl::abandon() {
  armed = false;
  failed = true;
  order.clear();
  forward_work.reset();
  factor = 1;
  const Result<> drained = drain();
  if (group->membership().size == 1 || !groups_status()) return;
  if (drained) {
    agreement.emplace(*group, FailurePoint{times.iteration, next});
  } else {
    group->abort(drained.error());
  }
}

/// Of the group and those that the hook has besides: the error of the first that is dead.
Result<> Reducer::Impl::groups_status() const {
  MUSTER_TRY(group->status());
  for (const auto& each : hook_groups) MUSTER_TRY(each->status());
  return {};
}

/// Throws unless all ranks may begin another backward after one that failed here.
void Reducer::Impl::check_recovered() {
  if (!failed) return;
  value_or_throw(groups_status());
  if (agreement) agreement->confirm(*group);
  agreement.reset();
  failed = false;
}

void Reducer::Impl::reset() {
  static_cast<void>(drain());
  armed = begun = unfinished = finish_queued = delay_queued = false;
  rebuilt = counted = searched = used_reduced = false;
  graph_is_static = true;
  next = 0;
  order.clear();
  unused.clear();
  unused_before.clear();
  futures.clear();
  used.zero_();
  std::fill(calls.begin(), calls.end(), 0);
  for (const auto& bucket : buckets) bucket->begin_backward();
}

Reducer::Reducer(std::shared_ptr<Group> group, std::vector<at::Tensor> parameters, ReducerOptions options)
    : impl_(std::make_shared<Impl>(std::move(group), std::move(parameters), std::move(options))) {
  for (size_t i = 0; i < impl_->parameters.size(); ++i) {
    NodePtr accumulator = torch::autograd::impl::grad_accumulator(impl_->parameters[i]);
    const auto& all = impl_->accumulators;
    TORCH_CHECK(accumulator, "parameter ", impl_->name_of(i), " does not require a gradient, or is no leaf");
    TORCH_CHECK(std::find(all.begin(), all.end(), accumulator) == all.end(), "parameter ", impl_->name_of(i),
                " is given twice");
    impl_->accumulators.push_back(std::move(accumulator));
  }
  for (size_t i = 0; i < impl_->accumulators.size(); ++i) {
    const auto call = [weak = std::weak_ptr<Impl>(impl_), i] {
      if (const auto impl = weak.lock()) impl->on_gradient(i);
    };
    impl_->hooks.emplace_back(i, impl_->accumulators[i]->add_post_hook(post_hook(call)));
  }
}

Reducer::~Reducer() {
  const std::lock_guard lock(impl_->mutex);
  impl_->closed = true;
  remove_hooks();
}

void Reducer::remove_hooks() {
  for (const auto& [index, key] : impl_->hooks) impl_->accumulators[index]->del_post_hook(key);
  impl_->hooks.clear();
}

void Reducer::prepare_for_forward() { impl_->forward_time = steady_clock().now(); }

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(impl_->mutex);
  impl_->arm(outputs);
}

bool Reducer::rebuild_buckets() {
  const std::lock_guard lock(impl_->mutex);
  return impl_->rebuild();
}

void Reducer::set_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::vector<std::shared_ptr<Group>> groups) {
  const std::lock_guard lock(impl_->mutex);
  TORCH_CHECK(!impl_->hook, "register_comm_hook or register_builtin_comm_hook can only be called once.");
  impl_->check_finished();
  impl_->hook = std::move(hook);
  impl_->hook_groups = std::move(groups);
  if (impl_->wants_no_gaps()) impl_->make_buckets(bucket_parameters());
}

Future Reducer::all_reduce(c10d::GradBucket& bucket) {
  const at::Tensor buffer = bucket.getBuffer();
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (buffer.is_sparse()) {
    const at::NoGradGuard no_grad;
    at::Tensor sum = sum_sparse(*impl_->group, buffer);
    buffer.copy_(sum.div_(impl_->group->membership().size));
    future->markCompleted(std::vector<at::Tensor>{buffer});
    return future;
  }
  const Work work = impl_->group->all_reduce(value_or_throw(view_of(buffer)), ReduceOp::kAverage, {.async = true});
  work.on_done([future, buffer](const Result<>& result) {
    if (result) {
      future->markCompleted(std::vector<at::Tensor>{buffer});
    } else {
      future->setError(to_exception(result.error()));
    }
  });
  return future;
}

Future Reducer::run_hook(c10d::GradBucket& bucket) {
  return impl_->hook ? impl_->hook->runHook(bucket) : all_reduce(bucket);
}

void Reducer::set_static_graph() {
  const std::lock_guard lock(impl_->mutex);
  TORCH_CHECK(impl_->times.iteration == 0 && !impl_->begun,
              "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
              "constructed.");
  impl_->options.static_graph = true;
}

void Reducer::delay_all_reduce() { impl_->delay_all_reduce(); }
void Reducer::set_optimizer_in_backward() { impl_->optimizer_in_backward = true; }

void Reducer::set_reduction_dtype(at::ScalarType dtype) {
  const std::lock_guard lock(impl_->mutex);
  impl_->dtype = dtype;
  impl_->make_buckets(bucket_parameters());
}

void Reducer::wait_at_end(Future future) { impl_->futures.push_back(std::move(future)); }

std::vector<c10d::GradBucket> Reducer::zero_buckets() const {
  std::vector<c10d::GradBucket> dense, late;
  for (size_t i = 0; i < impl_->buckets.size(); ++i) {
    const Bucket& bucket = *impl_->buckets[i];
    const at::Tensor zeros =
        bucket.sparse ? empty_sparse_like(bucket.variables.front()) : make_flat(*impl_->group, bucket, impl_->dtype);
    auto& list = !impl_->hook && bucket.sparse ? late : dense;
    list.push_back(bucket.grad_bucket(i, impl_->buckets.size(), zeros));
  }
  for (c10d::GradBucket& bucket : late) dense.push_back(std::move(bucket));
  return dense;
}

void Reducer::set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial) {
  const std::lock_guard lock(impl_->mutex);
  impl_->forward_work = std::move(work);
  impl_->divide_by_initial = divide_by_initial;
}

void Reducer::shadow_backward() {
  const std::lock_guard lock(impl_->mutex);
  impl_->guarded([&] { impl_->shadow(); });
}

void Reducer::divide_once_by(int ranks) {
  const std::lock_guard lock(impl_->mutex);
  impl_->factor = static_cast<double>(impl_->group->membership().size) / ranks;
}

void Reducer::push_all_rebuilt_parameters() {
  const std::lock_guard lock(impl_->mutex);
  if (!impl_->rebuilds() || !impl_->order.empty()) return;
  impl_->order.resize(impl_->parameters.size());
  std::iota(impl_->order.begin(), impl_->order.end(), size_t{0});
}

at::Tensor Reducer::used_map() const { return impl_->used; }
bool Reducer::is_counting() const { return impl_->counting(); }
bool Reducer::graph_is_static() const { return impl_->options.static_graph || impl_->graph_is_static; }

void Reducer::check_finished() const {
  const std::lock_guard lock(impl_->mutex);
  impl_->check_finished();
}

std::string Reducer::last_error() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->error;
}

void Reducer::note_error(std::string text) {
  const std::lock_guard lock(impl_->mutex);
  impl_->error = std::move(text);
}

void Reducer::reset() {
  const std::lock_guard lock(impl_->mutex);
  impl_->reset();
}

void Reducer::set_group(std::shared_ptr<Group> group) {
  const std::lock_guard lock(impl_->mutex);
  impl_->reset();
  impl_->failed = false;
  impl_->agreement.reset();
  impl_->group = std::move(group);
  impl_->make_buckets(bucket_parameters());  // in memory that the new group's ranks share
}

std::vector<std::vector<size_t>> Reducer::bucket_parameters() const {
  std::vector<std::vector<size_t>> all;
  for (const auto& bucket : impl_->buckets) all.push_back(bucket->parameters);
  return all;
}

std::vector<size_t> Reducer::bucket_bytes() const {
  std::vector<size_t> all;
  for (const auto& bucket : impl_->buckets) all.push_back(bucket->bytes());
  return all;
}

const BackwardTimes& Reducer::times() const { return impl_->times; }
const StepHistory& Reducer::history() const { return impl_->steps.history(); }
Group& Reducer::group() const { return *impl_->group; }
const std::vector<std::string>& Reducer::names() const { return impl_->options.names; }

}  // namespace muster
