#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "muster/group/group.h"

namespace muster {

/// Counts the Works that the group's thread still holds, and with them tensors whose release may need Python's lock.
class Pending {
 public:
  /// One of them, from its making to its destruction.
  class Ticket {
   public:
    explicit Ticket(std::shared_ptr<Pending> pending);
    ~Ticket();
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;

   private:
    std::shared_ptr<Pending> pending_;  // shared: the last callback may end after the backend
  };

  /// Waits until there are none; false when `timeout` passes first.
  bool drain(std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;
  std::condition_variable none_left_;
  int count_ = 0;
};

/// c10d's handle on one call: one or several operations of a group over the tensors that it keeps alive.
/// Done when the last of them is done and results have been copied to where the caller wants them. Thread-safe.
class TensorWork final : public c10d::Work {
 public:
  /// `title` is what profilers show and must outlive the Work. `outputs` is what result() and the future give.
  TensorWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
             std::vector<at::Tensor> outputs);

  /// Before start(): once the operations succeed, copies `from` to `to`.
  void copy_when_done(at::Tensor to, at::Tensor from);
  /// Before start(): keeps memory that an operation reads.
  void keep_alive(at::Tensor tensor);
  /// Waits for nothing: `parts`, in the order of the group's queue, finish the Work now or on the group's thread.
  static void start(const c10::intrusive_ptr<TensorWork>& work, std::vector<muster::Work> parts, uint64_t sequence,
                    const std::shared_ptr<Pending>& pending);

  /// Throws the operation's error, or muster::ErrorException (kTimeout) when `timeout` passes first.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  void part_done(size_t index, const Result<>& result);
  void complete();
  void complete_future(const c10::intrusive_ptr<c10::ivalue::Future>& future);

  const char* title_;
  std::vector<at::Tensor> outputs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
  std::vector<at::Tensor> kept_;
  uint64_t sequence_ = 0;

  // Guarded by the base's mutex_ from start() on.
  size_t running_ = 0;
  size_t failed_part_ = SIZE_MAX;  ///< the first, in the order of the queue: later ones only say that it failed
  std::optional<Error> error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_completed_ = false;
};

}  // namespace muster
