#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "muster/group/group.h"
#include "muster/torch/c10d/request.h"
#include "muster/torch/c10d/work.h"

namespace muster {

/// The c10d backend "muster": torch's process group calls become calls of one Group. CPU tensors of any strides.
/// Operations it does not override are refused by c10d's base class with one sentence. Thread-safe as Group is.
/// Throws c10::ValueError for wrong arguments, muster::ErrorException for failures. A call with asyncOp=false blocks
/// and returns no Work.
class ProcessGroupMuster final : public c10d::Backend {
 public:
  using Handle = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using Milliseconds = std::chrono::milliseconds;

  /// Told of a backend that was made: by create(), or out of one that was.
  using OnCreate = std::function<void(const c10::intrusive_ptr<ProcessGroupMuster>&)>;

  /// Meets the other ranks through `store`. Blocks, up to `timeout`: call it without the GIL. `arena`, if any, is where
  /// allocateTensor() has memory from: one for all groups of a process.
  static c10::intrusive_ptr<ProcessGroupMuster> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const GroupSpec& membership, Milliseconds timeout,
                                                       std::shared_ptr<Arena> arena = nullptr, OnCreate made = {});
  ProcessGroupMuster(std::unique_ptr<Store> store, std::unique_ptr<Group> group, Milliseconds timeout, OnCreate made);
  ~ProcessGroupMuster() override;

  const std::string getBackendName() const override { return "muster"; }  // NOLINT: c10d's signature
  /// A copy: what is changed in it changes nothing here.
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(Milliseconds timeout) override;

  // backend_reduce.cpp
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Handle reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  Handle _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions& options) override;
  Handle reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::ReduceScatterOptions& options) override;
  // backend_sparse.cpp
  /// Ends before it returns, also with asyncOp: how much is to be sent is known only once all ranks have said it.
  Handle allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;

  // backend_gather.cpp
  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Handle allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Handle _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Handle allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Handle allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) override;
  Handle gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Handle scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;

  // backend_exchange.cpp
  Handle alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                       std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Handle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Handle send(Tensors& tensors, int destination, int tag) override;
  Handle recv(Tensors& tensors, int source, int tag) override;
  Handle recvAnysource(Tensors& tensors, int tag) override;
  Handle barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  bool supportsCoalescing() const override { return true; }
  /// Until endCoalescing(), what this thread calls begins nothing, and what it gets may be waited for only then. A call
  /// that fails cancels the block, as cancelCoalescing() does.
  void startCoalescing() override;
  Handle endCoalescing() override;
  /// Ends this thread's block, if it has begun one: nothing of it begins, and waits for it fail.
  void cancelCoalescing();

  // backend_life.cpp
  /// The group counts by itself from zero; nothing to agree on.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->sequence(); }
  /// Always on: Works know how long they took.
  void enableCollectivesTiming() override {}
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  c10d::ErrorType getError() override;
  /// Ends what is pending here and, as far as they can be reached, at the other ranks.
  void abort() override;
  /// Waits a little for what is pending, then aborts it, and leaves the group: afterwards no thread of it holds a
  /// tensor, the other ranks' calls fail at once, and so do this one's.
  void shutdown() override;
  bool supportsSplitting() const override { return true; }
  /// A group of `ranks`, which all ranks of this one must call for; null where this rank is none of them.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  /// A group of `size` ranks, which may come from several groups that share `store`.
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;
  bool supportsShrinking() const override { return true; }
  /// A group of the other ranks, which alone call it: those that are excluded may be dead, and this group too.
  /// `flags` 1 (torch's SHRINK_ABORT) aborts this group first.
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                     const c10::intrusive_ptr<Options>& options) override;

  // Memory that the ranks of this host share: collectives move such tensors' bytes once. Tensors may outlive the group.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return group_->arena() != nullptr; }
  /// Ordinary memory where this rank shares none with another.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;  // NOLINT: c10d's type
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  /// The group below: for its transport and status.
  Group& group() { return *group_; }
  /// Another backend of the same ranks, all of which must call: for calls whose order has nothing to do with that of
  /// this one's. It lives on without this.
  c10::intrusive_ptr<ProcessGroupMuster> duplicate();

 private:
  class SyncCallScope;  ///< a call that runs in the caller's thread

  bool coalescing() const { return coalescing_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  /// To be made before anything else is looked at: within a block, a request that does not come to launch() cancels it.
  Request request(c10d::OpType type, const char* title, bool async) {
    return coalescing() ? request_in_block(type, title) : Request(type, title, async);
  }
  Request request_in_block(c10d::OpType type, const char* title);
  Milliseconds timeout_or_default(Milliseconds timeout) const {
    return timeout.count() > 0 ? timeout : timeout_.load(std::memory_order_relaxed);
  }
  Milliseconds timeout_of(const c10::intrusive_ptr<Options>& options) const;
  /// Has the core do what was requested. Waits for it unless the request is asynchronous, or is put off within a
  /// coalescing block. `inputs` is for profilers.
  Handle launch(Request&& request, at::TensorList inputs, Milliseconds timeout = c10d::kUnsetTimeout);
  muster::Work submit(Request& request, const CallOptions& options);
  void start(const c10::intrusive_ptr<TensorWork>& work, const CallOptions& options);
  Handle launch_receive(Tensors& tensors, int source, int tag, c10d::OpType type);
  c10::intrusive_ptr<ProcessGroupMuster> adopt(std::unique_ptr<Store> store, Result<std::unique_ptr<Group>> group,
                                               Milliseconds timeout) const;

  std::unique_ptr<Store> store_;  // outlives the group, which may still use it
  std::unique_ptr<Group> group_;
  std::atomic<Milliseconds> timeout_;
  std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();
  const OnCreate made_;
  pid_t process_;
  std::atomic<int> splits_ = 0;  ///< so far: every rank makes as many, so they number the groups made here
  std::atomic<std::thread::id> coalescing_thread_{};  ///< whose calls are put off; nobody's by default
  c10::intrusive_ptr<TensorWork> block_;              ///< what they become; touched by that thread only
  bool added_ = false;                                ///< the last request within it was added; touched so, too
};

using TorchBackend [[deprecated("renamed to ProcessGroupMuster")]] = ProcessGroupMuster;

}  // namespace muster
