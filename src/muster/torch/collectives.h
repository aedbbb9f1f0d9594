#pragma once

// The collectives for C++ programs that use libtorch. Form a group, then call them with tensors:
//
//   const auto group = muster::join_job();  // under `muster run`; else Group::form()
//   muster::all_reduce(*group, gradient, muster::ReduceOp::kAverage);
//
// Every call blocks until it is done at this rank, and throws muster::ErrorException (torch/exception.h) when it fails.
// The calls in muster::async return at once. torch/nn/functional.h has calls with gradients.
// Tensors are on the CPU, of any strides and any dtype that the operation supports. Shapes and dtypes are equal at all
// ranks. Threads may share a group. Its calls run one after the other in the order in which they are made, which must
// be the same at all ranks; send() and recv() run beside them. Other threads must not use a call's tensors until it
// returns.

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <utility>
#include <vector>

#include "muster/group/group.h"
#include "muster/torch/exception.h"

namespace muster {

/// Group::join_job(), with exceptions. Throws c10::ValueError in a process that was started in another way.
std::shared_ptr<Group> join_job();

/// Group::job_store(), with exceptions.
std::unique_ptr<Store> job_store();

/// In place: `tensor` becomes the reduction over all ranks.
void all_reduce(Group& group, at::Tensor tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
/// The same for many tensors (a model's gradients): one operation for each dtype, which reads and writes them in place.
void all_reduce(Group& group, const std::vector<at::Tensor>& tensors, ReduceOp op = ReduceOp::kSum,
                const CallOptions& options = {});
/// In place at the root; the other ranks' `tensor` is only read.
void reduce(Group& group, at::Tensor tensor, ReduceOp op = ReduceOp::kSum, Rank root = 0,
            const CallOptions& options = {});
/// In place: `tensor` becomes the root's tensor.
void broadcast(Group& group, at::Tensor tensor, Rank root = 0, const CallOptions& options = {});
/// The same for many tensors (a model's parameters and buffers).
void broadcast(Group& group, const std::vector<at::Tensor>& tensors, Rank root = 0, const CallOptions& options = {});
/// Returns a tensor of shape [size, *tensor.shape]: slot r is rank r's `tensor`.
at::Tensor all_gather(Group& group, const at::Tensor& tensor, const CallOptions& options = {});
/// As all_gather(), but only the root gets the result. The other ranks get an undefined tensor.
at::Tensor gather(Group& group, const at::Tensor& tensor, Rank root = 0, const CallOptions& options = {});
/// `tensor` becomes slot `rank` of the root's `tensors`, of shape [size, *tensor.shape]. The `tensors` of other ranks
/// are ignored.
void scatter(Group& group, const at::Tensor& tensors, at::Tensor tensor, Rank root = 0,
             const CallOptions& options = {});
/// Returns the reduction of slot `rank` over all ranks. `tensors` has the shape [size, ...].
at::Tensor reduce_scatter(Group& group, const at::Tensor& tensors, ReduceOp op = ReduceOp::kSum,
                          const CallOptions& options = {});
/// Returns a tensor of the same shape, [size, ...]: slot r of `tensors` goes to rank r, slot r of the result comes from
/// rank r.
at::Tensor all_to_all(Group& group, const at::Tensor& tensors, const CallOptions& options = {});
/// Blocks until `tensor` may be modified.
void send(Group& group, const at::Tensor& tensor, Rank dst, uint32_t tag = 0, const CallOptions& options = {});
/// Receives into `tensor`, which must have the length sent. `src` may be kAnyRank. Returns the rank that sent it.
Rank recv(Group& group, at::Tensor tensor, Rank src, uint32_t tag = 0, const CallOptions& options = {});
[[deprecated("renamed to recv")]] inline Rank receive(Group& group, at::Tensor tensor, Rank src, uint32_t tag = 0,
                                                      const CallOptions& options = {}) {
  return recv(group, std::move(tensor), src, tag, options);
}
/// Returns when every rank has called it.
void barrier(Group& group, const CallOptions& options = {});

/// A call that runs on the group's progress thread, or on a thread that waits for it. Copies refer to the same call. It
/// continues, and keeps its tensors alive, when all copies are dropped. Thread-safe.
class AsyncWork {
 public:
  AsyncWork(c10::intrusive_ptr<c10d::Work> work, at::Tensor result)
      : work_(std::move(work)), result_(std::move(result)) {}

  /// True once wait() would return or throw at once.
  bool is_completed() const { return work_->isCompleted(); }
  /// Returns the result of the call, as its blocking form does; the tensor for recv() and calls that work in place.
  /// Throws the call's error, or kTimeout if `timeout` passes first; the call then continues. Zero: the call's own
  /// timeout.
  at::Tensor wait(Duration timeout = Duration::zero()) const;
  /// The rank that a recv() got its message from, once wait() has returned.
  Rank source() const { return work_->sourceRank(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor result_;
};

/// Most calls above as calls that return at once. No thread may use their tensors until wait() has returned.
namespace async {

AsyncWork all_reduce(Group& group, at::Tensor tensor, ReduceOp op = ReduceOp::kSum, const CallOptions& options = {});
AsyncWork reduce(Group& group, at::Tensor tensor, ReduceOp op = ReduceOp::kSum, Rank root = 0,
                 const CallOptions& options = {});
AsyncWork broadcast(Group& group, at::Tensor tensor, Rank root = 0, const CallOptions& options = {});
AsyncWork all_gather(Group& group, const at::Tensor& tensor, const CallOptions& options = {});
AsyncWork reduce_scatter(Group& group, const at::Tensor& tensors, ReduceOp op = ReduceOp::kSum,
                         const CallOptions& options = {});
AsyncWork all_to_all(Group& group, const at::Tensor& tensors, const CallOptions& options = {});
AsyncWork send(Group& group, const at::Tensor& tensor, Rank dst, uint32_t tag = 0, const CallOptions& options = {});
AsyncWork recv(Group& group, at::Tensor tensor, Rank src, uint32_t tag = 0, const CallOptions& options = {});
/// Its result is an undefined tensor.
AsyncWork barrier(Group& group, const CallOptions& options = {});

}  // namespace async

}  // namespace muster
