#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "muster/group/group.h"
#include "muster/torch/c10d/request.h"

namespace muster {

/// What a backend's Works share, and what the last of them may need after the backend has gone.
class Pending {
 public:
  /// A Work that the group's thread still holds, and with it tensors whose release may need Python's lock; from its
  /// making to its destruction.
  class InFlightGuard {
   public:
    explicit InFlightGuard(std::shared_ptr<Pending> pending);
    ~InFlightGuard();
    InFlightGuard(const InFlightGuard&) = delete;
    InFlightGuard& operator=(const InFlightGuard&) = delete;

   private:
    std::shared_ptr<Pending> pending_;  // shared: the last callback may end after the backend
  };
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  /// Waits until there are none; false when `timeout` passes first.
  bool drain(std::chrono::milliseconds timeout);

  /// Called with every operation that has ended. Once, and before the first operation that is to be told of.
  void set_hook(Hook hook);
  bool hooked() const { return hooked_.load(std::memory_order_acquire); }
  void tell(c10d::OpType type, uint64_t sequence, TimePoint began, TimePoint ended) const;

 private:
  std::mutex mutex_;
  std::condition_variable none_left_;
  int count_ = 0;
  std::atomic<bool> hooked_ = false;
  Hook hook_;
};

/// c10d's handle on one call: its request, whose tensors it keeps alive, and the core's Works. Done when the last of
/// these is done and results have been copied to where the caller wants them. Thread-safe.
class TensorWork final : public c10d::Work {
 public:
  /// `inputs` is for profilers.
  TensorWork(int rank, Request request, at::TensorList inputs, std::shared_ptr<Pending> pending);

  Request& request() { return request_; }
  /// `parts`, what the request asked of the core, finish the Work now, within wait(), or on the group's thread. Until
  /// this or cancel() is called, wait() returns at once: what a coalescing block holds has not begun.
  static void start(const c10::intrusive_ptr<TensorWork>& work, std::vector<muster::Work> parts, uint64_t sequence);

  /// In place of start(): wait() throws `why`, and nothing begins.
  void cancel(const Error& why);

  bool isCompleted() override;
  /// Throws the operation's error, or muster::ErrorException (kTimeout) when `timeout` passes first.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return request_.outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  /// Of a c10d::WorkResult, as an integer: TIMEOUT where a deadline passed, COMM_ERROR for other failures. Never fails.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  /// Of a receive from any rank, once it is done.
  int sourceRank() const override;
  /// Milliseconds from the call to its end, once it is done.
  float getDuration() const override;

 private:
  bool parts_done() const;
  void settle();
  std::exception_ptr outcome();
  void end(const std::exception_ptr& exception);
  void complete_future();

  Request request_;
  const std::shared_ptr<Pending> pending_;
  const TimePoint began_ = steady_clock().now();
  TimePoint ended_{};

  std::vector<muster::Work> parts_;     // written before started_
  uint64_t sequence_ = 0;               // the same
  std::atomic<bool> started_ = false;   ///< start() was called
  std::atomic<bool> settling_ = false;  ///< somebody has seen all parts done, and does what is left

  // Guarded by the base's mutex_.
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_completed_ = false;
};

/// A profiler's event "muster:..." around what the caller's thread does itself. Costs next to nothing without one.
class ProfilerEvent {
 public:
  ProfilerEvent(const char* title, at::TensorList inputs);
  ~ProfilerEvent();
  ProfilerEvent(const ProfilerEvent&) = delete;
  ProfilerEvent& operator=(const ProfilerEvent&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

}  // namespace muster
