#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "muster/group/group.h"
#include "muster/torch/c10d/tensor_request.h"

namespace muster {

/// Counts the Works of a backend that are in flight, and runs its completion hook. Works share it, because the last one
/// may end after the backend.
class PendingWorks {
 public:
  /// Counts one Work that a callback of the group still holds. Releasing the Work's tensors may need Python's GIL.
  class InFlightGuard {
   public:
    explicit InFlightGuard(std::shared_ptr<PendingWorks> pending);
    ~InFlightGuard();
    InFlightGuard(const InFlightGuard&) = delete;
    InFlightGuard& operator=(const InFlightGuard&) = delete;

   private:
    std::shared_ptr<PendingWorks> pending_;  // shared, because the last Work may end after the backend
  };
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  /// Waits until no Work is in flight. Returns false when `timeout` passes first.
  bool drain(std::chrono::milliseconds timeout);

  /// `hook` is called with every operation that has ended. Call it at most once, and before the first operation.
  void set_hook(Hook hook);
  bool has_hook() const { return has_hook_.load(std::memory_order_acquire); }
  /// Only after has_hook() has returned true.
  void run_hook(c10d::OpType type, uint64_t sequence, TimePoint began, TimePoint ended) const;

 private:
  // `mutex_` guards count_. hook_ is written once, before the release store to has_hook_. A thread reads hook_ only
  // after the acquire load in has_hook() has returned true, so it sees the complete hook and needs no lock.
  std::mutex mutex_;
  std::condition_variable none_left_;
  int count_ = 0;
  std::atomic<bool> has_hook_ = false;
  Hook hook_;
};

/// c10d's handle of one call: its request, whose tensors it keeps alive, and the core's Works. It is complete when the
/// last of these Works is done and the results have been copied to the caller's tensors. If it runs on a device, wait()
/// may return before: it makes the calling thread's stream wait, and not the thread. If a graph captures it, it is
/// complete once it is part of the graph. Thread-safe.
class TensorWork final : public c10d::Work {
 public:
  /// Profilers show `inputs`.
  TensorWork(int rank, TensorRequest request, at::TensorList inputs, std::shared_ptr<PendingWorks> pending);

  TensorRequest& request() { return request_; }
  /// `parts` are the core's Works for the request. This Work completes now, within wait(), or on a progress thread.
  /// Until start() or cancel() is called, wait() returns at once, because the coalescing block has not begun.
  static void start(const c10::intrusive_ptr<TensorWork>& work, std::vector<muster::Work> parts, uint64_t sequence);

  /// Submits the request to `host`, or to the group on the device that its tensors are on, and starts the Work. Returns
  /// when it is submitted, if options.async. Throws if the group refuses the request's only operation.
  static void launch(const c10::intrusive_ptr<TensorWork>& work, Group& host, const CallOptions& options);

  /// Called instead of start(): no operation begins, and wait() throws `why`.
  void cancel(const Error& why);

  bool isCompleted() override;
  /// Throws the operation's error, or muster::ErrorException (kTimeout) when `timeout` passes first.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return request_.outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /// A c10d::WorkResult as an integer, once the operation has ended: TIMEOUT if a deadline passed, COMM_ERROR for other
  /// failures. Never fails.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  /// The rank that a receive from any rank got its message from, once it is done.
  int sourceRank() const override;
  /// Milliseconds from the call to its end, once it is done.
  float getDuration() const override;

 private:
  bool parts_done() const;
  void complete();
  std::exception_ptr finish_result();
  void publish(const std::exception_ptr& exception);
  void complete_future(const std::exception_ptr& exception);

  TensorRequest request_;
  std::optional<c10::Stream> stream_;    ///< of a request on a device; constant after launch()
  std::optional<c10::Event> on_stream_;  ///< the point after its results; constant after launch()
  bool is_captured_ = false;             ///< into a graph; constant after launch()
  const std::shared_ptr<PendingWorks> pending_;
  const TimePoint began_ = steady_clock().now();
  TimePoint ended_{};  ///< written by the thread that sets completing_, before finish() sets completed_ under mutex_
  // start() writes parts_ and sequence_, then stores started_ with release. isCompleted() and wait() load it with
  // acquire before they read parts_, so they see the complete list. completing_ is an exchange: only the thread that
  // gets false runs the completion, so copy_back(), release() and finish() run once.
  std::vector<muster::Work> parts_;
  uint64_t sequence_ = 0;
  std::atomic<bool> started_ = false;     ///< start() was called
  std::atomic<bool> completing_ = false;  ///< a thread completes or cancels the Work

  // Guarded by the base's mutex_.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_completed_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_result_;
};

/// A profiler event "muster:..." for a call that runs in the caller's thread. Costs almost nothing without a profiler.
class ProfilerEvent {
 public:
  ProfilerEvent(const char* title, at::TensorList inputs);

 private:
  std::optional<at::RecordFunction> record_;  ///< none without a profiler; its destructor ends the event
};

}  // namespace muster
