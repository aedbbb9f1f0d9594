#include "muster/torch/reducer/reduction_queue.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "muster/torch/c10d/sparse.h"
#include "muster/torch/exception.h"
#include "muster/torch/tensor.h"

namespace muster {

namespace {

/// Waits for a Work whose failure is not of interest.
bool ends(TensorWork& work, const Deadline& deadline) {
  try {
    work.wait(
        std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline.left()), std::chrono::milliseconds(1)));
  } catch (const std::exception&) {
  }
  return work.isCompleted();
}

}  // namespace

template <class Body>
auto ReductionQueue::with_hook_errors(Body body) const {
  try {
    return body();
  } catch (const ErrorException&) {
    throw;
  } catch (...) {
    value_or_throw(groups_status());
    throw;
  }
}

/// Sparse buckets are reduced at the end of backward, by blocking calls.
bool ReductionQueue::is_deferred(const Bucket& bucket) const {
  return bucket.sparse && !bucket.skipped && !hook_ && !is_single_rank();
}

void ReductionQueue::submit_full(bool last_inline) {
  const auto& all = buckets_.all();
  while (!all_begun() && all[begun_]->pending == 0) {
    const size_t index = begun_++;
    if (!all[index]->skipped && !is_single_rank()) submit(index, last_inline && all_begun());
  }
}

void ReductionQueue::submit(size_t index, bool inline_call) {
  const std::shared_ptr<Bucket>& bucket = buckets_.all()[index];
  const double factor = join_scale_.factor(context_.size(), hook_ != nullptr && !is_native());
  if (factor != 1) bucket->buffer.mul_(factor);
  if (is_deferred(*bucket)) return;
  bucket->times.begun = steady_clock().now();
  if (hook_) {
    c10d::GradBucket gradients =
        bucket_at(index, buckets_.all().size(), bucket->buffer, bucket->offsets, bucket->variables);
    bucket->future = with_hook_errors([&] { return hook_->runHook(gradients); });
    // Weak: the bucket owns the future, and a future that never completes keeps its callbacks.
    bucket->future->addCallback([weak = std::weak_ptr(bucket)](c10::ivalue::Future&) {
      if (const auto hooked = weak.lock()) hooked->ended = steady_clock().now().ns;
    });
    return;
  }
  if (!bucket->buffer.device().is_cpu()) {
    bucket->device_work = begin_on_device(bucket->buffer);
    if (context_.device_group() == nullptr) {  // over NCCL, the host does not see the end
      bucket->device_work->getFuture()->addCallback([weak = std::weak_ptr(bucket)](c10::ivalue::Future&) {
        if (const auto reduced = weak.lock()) reduced->ended = steady_clock().now().ns;
      });
    }
    return;
  }
  bucket->event.emplace("muster:all_reduce", bucket->buffer);
  bucket->work =
      context_.group->all_reduce(value_or_throw(view_of(bucket->buffer)), ReduceOp::kAverage, {.async = !inline_call});
  bucket->work->on_done([bucket](const Result<>&) { bucket->ended = steady_clock().now().ns; });
}

void ReductionQueue::reduce_deferred() {
  for (const auto& bucket : buckets_.all()) {
    if (!is_deferred(*bucket)) continue;
    bucket->times.begun = steady_clock().now();
    bucket->buffer.copy_(sum_sparse(*context_.group, bucket->buffer.cpu()).div_(context_.size()));
  }
}

c10::intrusive_ptr<TensorWork> ReductionQueue::begin_on_device(const at::Tensor& buffer) const {
  TensorRequest request(c10d::OpType::ALLREDUCE, "muster:all_reduce", /*async=*/true);
  request.device_groups = context_.options.device_group;
  const BufferView data = request.in_place_by_pieces(buffer);
  request.add(Collective::kAllReduce, data, data).call.op = ReduceOp::kAverage;
  auto work = c10::make_intrusive<TensorWork>(context_.rank(), std::move(request), at::TensorList(buffer),
                                              std::make_shared<PendingWorks>());
  TensorWork::launch(work, *context_.group, {.timeout = context_.group->timeout(), .async = true});
  return work;
}

void ReductionQueue::wait_for_hooks() const {
  for (const auto& bucket : buckets_.all()) {
    if (bucket->future) wait_for_future(bucket->future, bucket.get());
  }
}

/// Operations have deadlines of their own. For a hook that waits for anything else, the group's timeout is the
/// deadline.
void ReductionQueue::wait_for_future(const HookFuture& future, const Bucket* bucket) const {
  Group& group = *context_.group;
  if (wait_until(future, Deadline::after(group.timeout()))) return;
  const std::string which =
      bucket != nullptr ? c10::str(" of bucket ", buckets_.index_of(*bucket)) : " for the end of backward";
  const Error error{ErrorCode::kTimeout,
                    c10::str("the communication hook's future", which, " is not complete after ",
                             std::chrono::duration<double>(group.timeout()).count(), " s, the group's timeout"),
                    context_.rank()};
  context_.abort(error);  // otherwise the other ranks would wait for this one
  throw_error(error);
}

at::Tensor ReductionQueue::result_of(Bucket& bucket) const {
  if (bucket.work) value_or_throw(bucket.work->wait());
  if (bucket.device_work) bucket.device_work->wait();
  bucket.event.reset();
  at::Tensor result = bucket.buffer;
  if (bucket.future) {
    wait_for_future(bucket.future, &bucket);
    with_hook_errors([&] { bucket.future->waitAndThrow(); });
    result = hook_->parseHookResult(bucket.future->value());
    TORCH_CHECK(bucket.sparse || result.numel() == bucket.buffer.numel(), "a communication hook returned ",
                result.numel(), " elements for a bucket of ", bucket.buffer.numel());
  }
  const int64_t ended = bucket.ended;  // 0 if the completing thread has not written it yet
  bucket.times.ended = ended >= bucket.times.begun.ns && ended != 0 ? TimePoint{ended} : steady_clock().now();
  return result;
}

void ReductionQueue::finish() {
  for (const auto& future : futures_) {
    wait_for_future(future, nullptr);
    with_hook_errors([&] { future->waitAndThrow(); });
  }
  futures_.clear();
  join_scale_.reset();
}

Result<> ReductionQueue::drain() {
  constexpr Duration kGrace = std::chrono::seconds(10);  // in a dead group no operation runs longer
  Group& group = *context_.group;
  const Deadline deadline =
      Deadline::after(group.status() ? group.timeout() : std::min<Duration>(kGrace, group.timeout()));
  bool complete = true;
  for (const auto& bucket : buckets_.all()) {
    if (bucket->work) static_cast<void>(bucket->work->wait());
    if (bucket->device_work) complete = ends(*bucket->device_work, deadline) && complete;
    if (bucket->future) complete = wait_until(bucket->future, deadline) && complete;
  }
  for (const auto& future : std::exchange(futures_, {})) complete = wait_until(future, deadline) && complete;
  join_scale_.reset();
  if (complete) return {};
  return fail(ErrorCode::kTimeout,
              "a backward failed, and an operation or a communication hook's future that it left does not end",
              context_.rank());
}

Result<> ReductionQueue::groups_status() const {
  MUSTER_TRY(context_.status());
  for (const auto& group : hook_groups_) MUSTER_TRY(group->status());
  return {};
}

}  // namespace muster
