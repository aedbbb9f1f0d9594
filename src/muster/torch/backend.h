#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "muster/group/group.h"
#include "muster/torch/c10d/device/device_group.h"
#include "muster/torch/c10d/tensor_request.h"
#include "muster/torch/c10d/torch_versions.h"
#include "muster/torch/c10d/work.h"

namespace muster {

/// The c10d backend "muster": torch's process group calls become calls of one Group. Takes tensors of any strides and
/// on any device; those on a device go over NCCL (c10d/device/device_group.h), or through memory of the host
/// (c10d/device/staging.h). c10d's base class rejects the operations that are not overridden here. Thread-safe as Group
/// is. Throws c10::ValueError for wrong arguments, muster::ErrorException for failures. A call with asyncOp=false
/// returns no Work. It blocks, or, over NCCL, makes the current stream wait.
class ProcessGroupMuster final : public c10d::Backend {
 public:
  using Handle = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using Milliseconds = std::chrono::milliseconds;
  using OpType = c10d::OpType;

  /// For the owner of all backends of a process; both may be empty.
  struct Callbacks {
    /// Called with each new backend: one from create(), or one that split(), merge(), shrink() or duplicate() makes.
    std::function<void(const c10::intrusive_ptr<ProcessGroupMuster>&)> created;
    /// Called when a backend loses its last owner: destroys the group, and then its store. The caller may be a thread
    /// of that group, or hold a lock that such a thread needs.
    std::function<void(std::unique_ptr<Store>, std::unique_ptr<Group>)> released;
  };

  /// Forms a group with the other ranks through `store`. Blocks, up to `timeout`: call it without the GIL. `arena`, if
  /// any, provides the memory of allocateTensor(). All groups of a process share one arena.
  static c10::intrusive_ptr<ProcessGroupMuster> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const GroupSpec& membership, Milliseconds timeout,
                                                       std::shared_ptr<Arena> arena = nullptr,
                                                       Callbacks callbacks = {});
  /// The same with these options instead of those of the environment.
  static c10::intrusive_ptr<ProcessGroupMuster> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const GroupSpec& membership, const GroupOptions& options,
                                                       Callbacks callbacks = {});
#if MUSTER_TORCH_HAS_RECONFIGURE
  /// Forms no group yet: calls fail until reconfigure().
  static c10::intrusive_ptr<ProcessGroupMuster> create_unformed(const c10::intrusive_ptr<c10d::Store>& store,
                                                                const GroupSpec& membership,
                                                                const GroupOptions& options, Callbacks callbacks = {});
#endif
  ProcessGroupMuster(std::unique_ptr<Store> store, std::unique_ptr<Group> group, Milliseconds timeout,
                     Callbacks callbacks);
  ~ProcessGroupMuster() override { release_resources(); }
  /// Leaves the group. c10 calls it when the last owner goes; a weak pointer delays the destructor.
  void release_resources() override;

  const std::string getBackendName() const override { return "muster"; }  // NOLINT: c10d's signature
  /// Returns a copy.
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
  /// Blocks, also with asyncOp, because the message sizes are known only after an exchange.
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

#if MUSTER_TORCH_HAS_SINGLE
  Handle all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return _allgather_base(output, input, options);
  }
  Handle all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  Handle gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) override;
  Handle reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return _reduce_scatter_base(output, input, options);
  }
  Handle reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  Handle all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                           std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return alltoall_base(output, input, output_splits, input_splits, options);
  }
#endif

  // backend_alltoall_p2p.cpp
  Handle alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                       std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  Handle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Handle send(Tensors& tensors, int destination, int tag) override;
  Handle recv(Tensors& tensors, int source, int tag) override;
  Handle recvAnysource(Tensors& tensors, int tag) override;
  Handle barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  bool supportsCoalescing() const override { return true; }
  /// Until endCoalescing(), calls of this thread are only collected. Do not wait for their Works. A call that fails
  /// cancels the block, as cancelCoalescing() does.
  void startCoalescing() override;
  Handle endCoalescing() override;
  /// Discards this thread's block, if any. None of its operations begins, and wait() on its Work throws.
  void cancelCoalescing();

  // backend_lifecycle.cpp
  /// Nothing to do: the group counts from zero at all ranks.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->sequence(); }
  /// Always enabled: Works measure their duration.
  void enableCollectivesTiming() override {}
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  c10d::ErrorType getError() override;
  /// Aborts pending operations at this rank and at the ranks that can be reached.
  void abort() override;
  /// Waits up to 10 s for pending operations, then aborts them and waits up to 10 s again. Then leaves the group.
  /// Afterwards no thread of the group holds a tensor, and calls fail at once at all ranks.
  void shutdown() override;
  bool supportsSplitting() const override { return true; }
  /// Collective over this group: a group of `ranks`; null at the other ranks.
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  /// A group of `size` ranks. They may be members of several groups that share `store`.
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                    const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;
  bool supportsShrinking() const override { return true; }
  /// A group of all ranks except `excluded`. Only the remaining ranks call it. The excluded ranks and this group may be
  /// dead. `flags` 1 (torch's SHRINK_ABORT) aborts this group first.
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                     const c10::intrusive_ptr<Options>& options) override;

#if MUSTER_TORCH_HAS_RECONFIGURE
  /// False over MPI, which knows the ranks of the job only.
  bool supportsReconfigure() const override { return group_->transport() != "mpi"; }
  /// Names this backend among all of the job.
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return reconfiguration_.handle; }
  // backend_reconfigure.cpp
  /// Ends the group, and forms another one of the backends with these handles, through this one's store. Ranks are in
  /// the order of the handles, or of the sorted handles if they are a set. Blocks, and returns a Work that is complete.
  /// No other call of this backend may be under way, not even abort(). Pending Works may take a second. Throws
  /// c10::ValueError for a uuid that was used before, and for handles without this backend's. If it fails otherwise,
  /// the backend has no group.
  Handle reconfigure(const c10d::ReconfigureOptions& options) override;
#endif

  // Memory that the ranks of this host share: collectives move its bytes only once. Tensors may outlive the group.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return group_->arena() != nullptr; }
  /// Returns ordinary memory if this rank shares no memory with another rank.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;  // NOLINT: c10d's type
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  /// The underlying group, for its transport and status.
  Group& group() { return *group_; }
  LazyDeviceGroup& device_group() { return *device_group_; }
  /// Collective. Makes another backend of the same ranks: its calls need no common order with the calls of this one. It
  /// may outlive this backend.
  c10::intrusive_ptr<ProcessGroupMuster> duplicate();

 private:
  class SyncCallScope;  // c10d/sync_call.h

  bool coalescing() const { return block_.thread.load(std::memory_order_relaxed) == std::this_thread::get_id(); }
  /// Makes the request of a call. Must come first in the call: in a coalescing block, a request that is destroyed
  /// before launch(), such as by a failed argument check, cancels the block. The call's Work, if any, returns
  /// `outputs`.
  TensorRequest request(OpType type, const char* title, bool async, at::TensorList outputs = {}) {
    TensorRequest made = coalescing() ? request_in_block(type, title) : TensorRequest(type, title, async);
    if (made.async) made.outputs = outputs.vec();
    made.host_group = group_.get();
    made.device_groups = device_group_.get();
    return made;
  }
  TensorRequest request_in_block(OpType type, const char* title);
  /// For messages. In a coalescing block they go over NCCL, in one kernel, once a collective has formed the group.
  /// Others go through the host: in NCCL's one stream they would wait for each other.
  LazyDeviceGroup* device_group_for_messages() {
    return coalescing() && device_group_->formed() != nullptr ? device_group_.get() : nullptr;
  }
  Milliseconds timeout_or_default(Milliseconds timeout) const {
    return timeout.count() > 0 ? timeout : timeout_.load(std::memory_order_relaxed);
  }
  Milliseconds timeout_of(const c10::intrusive_ptr<Options>& options) const;
  /// Submits the request to the core. Waits for it unless it is asynchronous or in a coalescing block. Profilers show
  /// `inputs`.
  Handle launch(TensorRequest&& request, at::TensorList inputs, Milliseconds timeout = c10d::kUnsetTimeout);
  Handle launch_recv(Tensors& tensors, int source, int tag, OpType type);
  c10::intrusive_ptr<ProcessGroupMuster> wrap_child_group(std::unique_ptr<Store> store,
                                                          Result<std::unique_ptr<Group>> group,
                                                          Milliseconds timeout) const;

  void abort_groups(const Error& why);
  /// Leaves the group. Works that are still pending after `grace` fail with `why`.
  void end_group(std::chrono::seconds grace, const char* why);
  void release_group(std::unique_ptr<Store> store, std::unique_ptr<Group> group);
#if MUSTER_TORCH_HAS_RECONFIGURE
  static c10d::ReconfigureHandle new_handle();
#endif

  std::unique_ptr<Store> store_;  // outlives the group, which may still use it
  std::unique_ptr<Group> group_;
  std::unique_ptr<LazyDeviceGroup> device_group_ = std::make_unique<LazyDeviceGroup>(*group_);
  std::atomic<Milliseconds> timeout_;
  std::shared_ptr<PendingWorks> pending_ = std::make_shared<PendingWorks>();
  const Callbacks callbacks_;
  pid_t process_;
  /// Groups that reconfigure() has left. A model or a hook may still hold them.
  struct Former {
    std::unique_ptr<Group> group;
    std::unique_ptr<LazyDeviceGroup> on_device;  ///< without a group
  };
  /// What reconfigure() needs.
  struct Reconfiguration {
#if MUSTER_TORCH_HAS_RECONFIGURE
    const c10d::ReconfigureHandle handle = new_handle();
    std::set<int64_t> used_uuids;
#endif
    std::vector<Former> former_groups;
  };
  Reconfiguration reconfiguration_;
  std::atomic<int> splits_ = 0;  ///< groups made so far, for their names; the same at all ranks
  struct CoalescingBlock {
    /// The thread that has opened it. coalescing() compares it only with the calling thread's id, which only that
    /// thread stores, so a relaxed load is enough.
    std::atomic<std::thread::id> thread{};
    // Only that thread uses these.
    c10::intrusive_ptr<TensorWork> work;
    bool joined = false;  ///< the last request was added
  };
  CoalescingBlock block_;
};

using TorchBackend [[deprecated("renamed to ProcessGroupMuster")]] = ProcessGroupMuster;

}  // namespace muster
