#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "muster/group/group.h"
#include "muster/torch/work.h"

namespace muster {

/// The c10d backend "muster": torch's process group calls become calls of one Group. CPU tensors of any strides.
/// Operations it does not override are refused by c10d's base class with one sentence. Thread-safe as Group is.
/// Throws c10::ValueError for wrong arguments, muster::ErrorException for failures.
class TorchBackend final : public c10d::Backend {
 public:
  /// Meets the other ranks through `store`. Blocks, up to `timeout`: call it without the GIL.
  static c10::intrusive_ptr<TorchBackend> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const Membership& membership, std::chrono::milliseconds timeout);
  TorchBackend(std::unique_ptr<Store> store, std::unique_ptr<Group> group, std::chrono::milliseconds timeout);
  ~TorchBackend() override;

  const std::string getBackendName() const override { return "muster"; }  // NOLINT: c10d's signature
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  /// The group counts by itself from zero; nothing to agree on.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->sequence(); }
  c10d::ErrorType getError() override;
  /// Ends what is pending here and, as far as they can be reached, at the other ranks.
  void abort() override;
  /// Waits a little for what is pending, then aborts it: afterwards no thread of the group holds a tensor.
  void shutdown() override;

  /// The group below: for its transport and status.
  Group& group() { return *group_; }

 private:
  using Parts = std::vector<muster::Work>;

  CallOptions call(std::chrono::milliseconds timeout, bool async) const;
  c10::intrusive_ptr<TensorWork> new_work(c10d::OpType type, const char* title, std::vector<at::Tensor> inputs,
                                          std::vector<at::Tensor> outputs) const;
  c10::intrusive_ptr<c10d::Work> start(const c10::intrusive_ptr<TensorWork>& work, Parts parts) const;
  void gather_to_list(TensorWork& work, Parts& parts, const std::vector<at::Tensor>& slots, const at::Tensor& input,
                      const CallOptions& options);
  void gather_uneven(TensorWork& work, Parts& parts, const std::vector<at::Tensor>& slots, const at::Tensor& input,
                     const CallOptions& options);
  void gather_to_tensor(TensorWork& work, Parts& parts, const at::Tensor& output, const at::Tensor& input,
                        const CallOptions& options);

  std::unique_ptr<Store> store_;  // outlives the group, which may still use it
  std::unique_ptr<Group> group_;
  std::atomic<std::chrono::milliseconds> timeout_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();
  pid_t process_;
};

}  // namespace muster
