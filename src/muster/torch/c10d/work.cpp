#include "muster/torch/c10d/work.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <algorithm>

#include "muster/base/log.h"
#include "muster/torch/c10d/device/device_group.h"
#include "muster/torch/c10d/device/staging.h"
#include "muster/torch/c10d/gil_release.h"
#include "muster/torch/exception.h"

namespace muster {

PendingWorks::InFlightGuard::InFlightGuard(std::shared_ptr<PendingWorks> pending) : pending_(std::move(pending)) {
  const std::lock_guard lock(pending_->mutex_);
  ++pending_->count_;
}

PendingWorks::InFlightGuard::~InFlightGuard() {
  const std::lock_guard lock(pending_->mutex_);
  if (--pending_->count_ == 0) pending_->none_left_.notify_all();
}

bool PendingWorks::drain(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return none_left_.wait_for(lock, timeout, [this] { return count_ == 0; });
}

void PendingWorks::set_hook(Hook hook) {
  const std::lock_guard lock(mutex_);
  if (has_hook_) throw_error({ErrorCode::kInvalidArgument, "this process group has a completion hook already"});
  hook_ = std::move(hook);
  has_hook_.store(true, std::memory_order_release);
}

void PendingWorks::run_hook(c10d::OpType type, uint64_t sequence, TimePoint began, TimePoint ended) const {
  try {
    // WorkInfo has the clock and the unit of TimePoint.
    using Time = decltype(c10d::WorkInfo::timeStarted);
    hook_(std::make_shared<c10d::WorkInfo>(type, sequence, Time(Duration(began.ns)), Time(Duration(ended.ns)),
                                           std::chrono::duration<float>(ended - began)));
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, c10::str("the completion hook of a process group failed: ", error.what()));
  }
}

namespace {

/// Keeps a Work and its tensors alive until the last part is done, because the caller may drop its handle earlier. The
/// order of the members matters: `guard` must be destroyed after the Work.
struct CompletionContext {
  CompletionContext(std::shared_ptr<PendingWorks> pending, c10::intrusive_ptr<TensorWork> owned, size_t parts)
      : guard(std::move(pending)), work(std::move(owned)), running(parts) {}
  PendingWorks::InFlightGuard guard;
  c10::intrusive_ptr<TensorWork> work;
  std::atomic<size_t> running;
};

/// A c10d::WorkResult.
int64_t work_result_of(const std::exception_ptr& failure) {
  if (!failure) return static_cast<int64_t>(c10d::WorkResult::SUCCESS);
  try {
    std::rethrow_exception(failure);
  } catch (const ErrorException& exception) {
    if (exception.error().code == ErrorCode::kTimeout) return static_cast<int64_t>(c10d::WorkResult::TIMEOUT);
  } catch (...) {  // such as a failure to copy the results back
  }
  return static_cast<int64_t>(c10d::WorkResult::COMM_ERROR);
}

bool profiled() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

}  // namespace

TensorWork::TensorWork(int rank, TensorRequest request, at::TensorList inputs, std::shared_ptr<PendingWorks> pending)
    : c10d::Work(rank, request.type, profiled() ? request.title : nullptr,
                 profiled() ? std::optional(inputs.vec()) : std::nullopt),
      request_(std::move(request)),
      pending_(std::move(pending)) {}

void TensorWork::start(const c10::intrusive_ptr<TensorWork>& work, std::vector<muster::Work> parts, uint64_t sequence) {
  work->parts_ = std::move(parts);
  work->sequence_ = sequence;
  work->started_.store(true, std::memory_order_release);
  if (work->parts_done()) return work->complete();
  // Shared by the callbacks of all parts, and because a std::function must be copyable.
  const auto context = std::make_shared<CompletionContext>(work->pending_, work, work->parts_.size());
  for (const muster::Work& part : work->parts_) {
    part.on_done([context](const Result<>&) {
      // acq_rel: the callback that completes the Work sees all that happened before the callbacks of the other parts.
      if (context->running.fetch_sub(1, std::memory_order_acq_rel) == 1) context->work->complete();
    });
  }
}

namespace {

/// True if the call was rejected before it began.
bool was_rejected(const muster::Work& work) {
  if (!work.done()) return false;
  const Result<> result = work.result();
  return !result &&
         (result.error().code == ErrorCode::kInvalidArgument || result.error().code == ErrorCode::kUnsupported);
}

std::vector<muster::Work> submit(TensorRequest& request, Group& group, const CallOptions& options) {
  std::vector<muster::Work> parts;
  if (!request.messages.empty()) parts = group.exchange(std::move(request.messages), options);
  if (!request.operations.empty()) parts.push_back(request.submit(group, options));
  return parts;
}

}  // namespace

void TensorWork::launch(const c10::intrusive_ptr<TensorWork>& work, Group& host, const CallOptions& options) {
  TensorRequest& request = work->request_;
  const DeviceGroup* const on_device = request.device_group;
  std::vector<muster::Work> parts;
  if (on_device == nullptr) {
    parts = submit(request, host, options);
  } else {
    const c10::Stream& stream = on_device->stream;
    c10::Event inputs(stream.device_type());
    inputs.record(current_stream(stream.device()));
    inputs.block(stream);
    const StreamScope scope(stream);
    work->is_captured_ = is_capturing(stream.device());
    if (work->is_captured_) request.record_on(stream);
    parts = submit(request, *on_device->group, options);
    if (std::ranges::none_of(parts, was_rejected)) request.copy_back();
    work->stream_ = stream;
    work->on_stream_.emplace(stream.device_type());
    work->on_stream_->record(stream);
  }
  if (parts.size() == 1 && was_rejected(parts.front())) value_or_throw(parts.front().result());
  // Messages have no sequence number: they use that of the last collective.
  const uint64_t sequence = parts.empty() || parts.back().sequence() == 0 ? host.sequence() : parts.back().sequence();
  start(work, std::move(parts), sequence);
}

bool TensorWork::parts_done() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const muster::Work& part) { return part.done(); });
}

/// Copies the results back. Returns the failure of the copy, or the first failure in the order of the group's queue,
/// because later failures only follow from it.
std::exception_ptr TensorWork::finish_result() {
  for (const muster::Work& part : parts_) {
    const Result<> result = part.result();
    if (!result) return to_exception(result.error());
  }
  try {
    if (is_captured_) {
      // Nothing has run, and nothing can be waited for: replays have no Work.
    } else if (on_stream_) {
      const RelaxedCaptureMode relaxed(stream_->device());
      on_stream_->synchronize();  // the copies come after the operation, and release() drops their tensors
    } else {
      request_.copy_back();
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void TensorWork::complete() {
  if (completing_.exchange(true)) return;
  const std::exception_ptr exception = finish_result();
  ended_ = steady_clock().now();
  if (exception && stream_) request_.record_on(*stream_);  // what the stream still does may use the memory
  request_.release();
  std::optional<PendingWorks::InFlightGuard> in_flight;
  if (pending_->has_hook()) in_flight.emplace(pending_);
  publish(exception);
  if (in_flight) pending_->run_hook(request_.type, sequence_, began_, ended_);
}

void TensorWork::publish(const std::exception_ptr& exception) {
  finish(exception);
  std::unique_lock lock(mutex_);
  const auto result = future_result_;
  const bool completes = future_ && !std::exchange(future_completed_, true);
  lock.unlock();
  if (result && !result->completed()) result->markCompleted(work_result_of(exception));
  if (completes) complete_future(exception);
}

void TensorWork::cancel(const Error& why) {
  if (completing_.exchange(true)) return;
  ended_ = steady_clock().now();
  request_.release();
  publish(to_exception(why));
}

bool TensorWork::isCompleted() {
  if (started_.load(std::memory_order_acquire) && parts_done()) complete();
  return c10d::Work::isCompleted();
}

bool TensorWork::wait(std::chrono::milliseconds timeout) {
  if (!started_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex_);
    if (exception_) std::rethrow_exception(exception_);  // canceled
    return true;
  }
  const bool bounded = timeout > kNoTimeout;
  if (stream_) on_stream_->block(current_stream(stream_->device()));
  if (stream_ && !bounded && !parts_done()) return true;
  const GilRelease no_gil;
  const Deadline deadline = Deadline::after(bounded ? Duration(timeout) : Duration::zero());
  for (const muster::Work& part : parts_) {
    // Without a timeout, the operation's own deadline bounds the wait.
    static_cast<void>(bounded ? part.wait(deadline) : part.wait());
    if (!part.done()) {
      throw_error({ErrorCode::kTimeout, c10::str(request_.title, " timed out after ", timeout.count(),
                                                 " ms in wait(); the operation continues")});
    }
  }
  complete();
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return completed_; });  // another thread may be in complete()
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> TensorWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (!future_) {
    const std::vector<c10::Device> devices = stream_ ? std::vector{stream_->device()} : std::vector<c10::Device>{};
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  }
  if (!(completed_ || stream_) || std::exchange(future_completed_, true)) return future_;
  const std::exception_ptr exception = exception_;
  lock.unlock();
  complete_future(exception);
  return future_;
}

c10::intrusive_ptr<c10::ivalue::Future> TensorWork::getFutureResult() {
  const std::lock_guard lock(mutex_);
  if (!future_result_) {
    future_result_ = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    if (completed_) future_result_->markCompleted(work_result_of(exception_));
  }
  return future_result_;
}

void TensorWork::complete_future(const std::exception_ptr& exception) {
  if (exception) return future_->setError(exception);
  std::optional<StreamScope> results;  // what uses the value waits for this stream
  if (stream_) results.emplace(*stream_);
  future_->markCompleted(c10::IValue(request_.outputs));
}

int TensorWork::sourceRank() const { return parts_.empty() ? kNoRank : parts_.front().source(); }

float TensorWork::getDuration() const {
  const std::lock_guard lock(mutex_);
  if (!completed_)
    throw_error({ErrorCode::kInvalidArgument, c10::str(request_.title, " is not done yet: it has no duration")});
  return std::chrono::duration<float, std::milli>(ended_ - began_).count();
}

ProfilerEvent::ProfilerEvent(const char* title, at::TensorList inputs) {
  if (!profiled()) return;
  record_.emplace(at::RecordScope::USER_SCOPE);
  if (!record_->isActive()) return;
  record_->_setAsync();  // as for Works: trace readers expect collectives to be asynchronous events
  const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
  record_->before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
}

}  // namespace muster
