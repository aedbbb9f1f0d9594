#include "muster/torch/work.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>

#include "muster/torch/exception.h"

namespace muster {

Pending::Ticket::Ticket(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {
  const std::lock_guard lock(pending_->mutex_);
  ++pending_->count_;
}

Pending::Ticket::~Ticket() {
  const std::lock_guard lock(pending_->mutex_);
  if (--pending_->count_ == 0) pending_->none_left_.notify_all();
}

bool Pending::drain(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return none_left_.wait_for(lock, timeout, [this] { return count_ == 0; });
}

namespace {

/// What a callback owns: the Work, and with it the tensors, as the caller may drop its handle before the end. The
/// members' order matters: the ticket is given back once the Work is let go.
struct Held {
  Held(std::shared_ptr<Pending> pending, c10::intrusive_ptr<TensorWork> held)
      : ticket(std::move(pending)), work(std::move(held)) {}
  Pending::Ticket ticket;
  c10::intrusive_ptr<TensorWork> work;
};

}  // namespace

TensorWork::TensorWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
                       std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title, std::move(inputs)), title_(title), outputs_(std::move(outputs)) {}

void TensorWork::copy_when_done(at::Tensor to, at::Tensor from) {
  copies_.emplace_back(std::move(to), std::move(from));
}

void TensorWork::keep_alive(at::Tensor tensor) { kept_.push_back(std::move(tensor)); }

void TensorWork::start(const c10::intrusive_ptr<TensorWork>& work, std::vector<muster::Work> parts, uint64_t sequence,
                       const std::shared_ptr<Pending>& pending) {
  work->sequence_ = sequence;
  work->running_ = parts.size();
  if (parts.empty()) work->complete();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].done()) {
      work->part_done(i, parts[i].result());
    } else {
      // Shared, because a std::function must be copyable.
      parts[i].on_done([held = std::make_shared<Held>(pending, work), i](const Result<>& result) {
        held->work->part_done(i, result);
      });
    }
  }
}

void TensorWork::part_done(size_t index, const Result<>& result) {
  {
    const std::lock_guard lock(mutex_);
    if (!result && index < failed_part_) {
      failed_part_ = index;
      error_ = result.error();
    }
    if (--running_ > 0) return;
  }
  complete();
}

void TensorWork::complete() {
  std::exception_ptr exception;
  if (error_) {
    exception = to_exception(*error_);
  } else {
    try {
      const at::NoGradGuard no_grad;
      // The caller may be in inference mode, and this another thread: its tensors can only be written in that mode.
      const c10::InferenceMode inference;
      for (const auto& [to, from] : copies_) to.copy_(from);
    } catch (...) {
      exception = std::current_exception();
    }
  }
  copies_.clear();
  kept_.clear();
  finish(exception);

  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) return;
    if (std::exchange(future_completed_, true)) return;
    future = future_;
  }
  complete_future(future);
}

bool TensorWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto completed = [this] { return completed_; };
  if (timeout <= kNoTimeout) {
    cv_.wait(lock, completed);  // the operations' own deadlines end this
  } else if (!cv_.wait_for(lock, timeout, completed)) {
    throw_error({ErrorCode::kTimeout,
                 c10::str(title_, " was not done ", timeout.count(), " ms after wait() began; it goes on")});
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> TensorWork::getFuture() {
  bool complete_here = false;
  {
    const std::lock_guard lock(mutex_);
    if (!future_) future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    complete_here = completed_ && !std::exchange(future_completed_, true);
  }
  if (complete_here) complete_future(future_);
  return future_;
}

void TensorWork::complete_future(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  if (exception_) {
    future->setError(exception_);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace muster
