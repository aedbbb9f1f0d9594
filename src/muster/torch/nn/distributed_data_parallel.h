#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "muster/group/group.h"
#include "muster/torch/nn/tensors_in.h"
#include "muster/torch/reducer/reducer.h"

namespace muster::nn {

/// Options with the names and meanings of Python's torch.nn.parallel.DistributedDataParallel. Equal at all ranks.
struct DistributedDataParallelOptions {
  double bucket_cap_mb = 25;               ///< MiB of gradients that are reduced together
  double first_bucket_mb = 1;              ///< MiB of the first bucket: small, so that reduction starts early
  std::vector<double> bucket_cap_mb_list;  ///< MiB of the first buckets instead; the last entry is for all others
  bool find_unused_parameters = false;     ///< for a forward that does not always use all parameters
  bool gradient_as_bucket_view = true;     ///< gradients lie in the buckets; false (torch's default): one more copy
  bool static_graph = false;               ///< each iteration uses the same parameters equally often
  bool skip_all_reduce_unused_parameters = false;
  bool init_sync = true;          ///< compares the modules, then broadcasts rank 0's values
  bool broadcast_buffers = true;  ///< broadcasts rank 0's buffers before each forward
  /// Of the group, for a module on a device (torch/c10d/device/device_group.h); must outlive this object. Null:
  /// gradients go through the host.
  LazyDeviceGroup* device_group = nullptr;
};

struct JoinOptions {
  /// Averages gradients over all ranks; ranks without data contribute zeros. False: over the ranks that have data.
  bool divide_by_initial_world_size = true;
};

/// Base class of DistributedDataParallel, for any module.
class DistributedDataParallelBase : public torch::nn::Module {
 public:
  /// While a NoSync exists, backward only accumulates this rank's gradients. It must exist when forward is called. The
  /// next forward and backward without a NoSync reduce the sum.
  ///
  ///   { auto no_sync = ddp.no_sync(); loss_of(ddp, first).backward(); }
  ///   loss_of(ddp, second).backward();  // averages the sum of both
  class [[nodiscard]] NoSync {
   public:
    ~NoSync() { model_.synchronizes_ = before_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    friend class DistributedDataParallelBase;
    explicit NoSync(DistributedDataParallelBase& model)
        : model_(model), before_(std::exchange(model.synchronizes_, false)) {}
    DistributedDataParallelBase& model_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(*this); }

  /// Collective, for ranks with different numbers of batches. `train` trains on this rank's batches. A rank that has no
  /// more batches takes part in the steps of the others, with zero gradients, until all ranks are done. `update` is
  /// what follows a backward, such as the optimizer's step. It also runs after each backward of the others, so that
  /// parameters and optimizers stay the same at all ranks.
  ///
  ///   const auto update = [&] { optimizer.step(); };
  ///   ddp.join([&] {
  ///     for (auto& batch : *batches) {
  ///       optimizer.zero_grad();
  ///       loss_of(ddp, batch).backward();
  ///       update();
  ///     }
  ///   }, update);
  ///
  /// Each forward outside no_sync() must be followed by its backward, and only `update` may call other collectives.
  /// Each forward costs a small exchange. An exception from `train` leaves join() at once. Throws c10::ValueError with
  /// skip_all_reduce_unused_parameters, because a rank without data does not know what the others skip.
  void join(const std::function<void()>& train, const std::function<void()>& update, JoinOptions options = {});

  using Hook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(c10d::GradBucket&)>;
  /// Replaces the all-reduce of each bucket. The future's tensor is the result, already averaged. Call it at most once,
  /// before the first forward, in the same way at all ranks. The second form is for hooks with state, such as those of
  /// torch/hooks.h.
  void register_comm_hook(Hook hook);
  void register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook);

  const std::shared_ptr<Group>& group() const { return group_; }
  muster::Reducer& reducer() { return *reducer_; }
  const DistributedDataParallelOptions& options() const { return options_; }

  /// Throws c10::NotImplementedError, because buckets belong to one module. Clone the wrapped module and wrap the copy.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

 protected:
  DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Group> group,
                              DistributedDataParallelOptions options);

  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs, bool outputs_known);

 private:
  /// The next step of a rank in join(). Ordered: the step of the group is the maximum.
  enum class Step : uint8_t { kNone, kForward, kBackward };

  bool will_reduce() const;
  Step join_exchange(Step mine);
  void begin_step(bool reduces);

  std::shared_ptr<Group> group_;  // shared with its other users
  DistributedDataParallelOptions options_;
  std::vector<at::Tensor> buffers_to_sync_;
  std::unique_ptr<muster::Reducer> reducer_;
  bool synchronizes_ = true;       ///< no NoSync exists
  bool buffers_are_stale_ = true;  ///< after a forward under NoSync each rank keeps its own buffers
  Rank buffer_root_ = 0;           ///< rank 0; in join() the first rank that has data
  std::optional<JoinOptions> joining_;
};

namespace detail {

template <class M, class = void>
struct Wrapped {
  using Type = M;
};
template <class Holder>
struct Wrapped<Holder, std::void_t<typename Holder::ContainedType>> {
  using Type = typename Holder::ContainedType;
};

}  // namespace detail

/// Data parallelism: every rank holds the module and computes on its part of each batch. Backward averages the
/// gradients over the ranks while it runs (muster::Reducer). `M` is the class of the module or of its holder:
///
///   Net net;  // TORCH_MODULE(Net), or std::make_shared<NetImpl>()
///   muster::nn::DistributedDataParallel ddp(net, group);
///   torch::optim::SGD optimizer(ddp.parameters(), 0.1);
///   cross_entropy(ddp.forward(images), digits).backward();
///   optimizer.step();
///
/// It is a torch::nn::Module with the wrapped module as its child "module". Move and convert the module before it is
/// wrapped, and do not add parameters later. Every rank must construct it and call forward and backward in the same
/// way. If the modules differ, it throws ErrorException, which names the parameter or buffer and the rank. Wrong use
/// throws c10::Error. Not thread-safe.
template <class M>
class DistributedDataParallel : public DistributedDataParallelBase {
 public:
  using Wrapped = typename detail::Wrapped<M>::Type;

  DistributedDataParallel(std::shared_ptr<Wrapped> module, std::shared_ptr<Group> group,
                          DistributedDataParallelOptions options = {})
      : DistributedDataParallelBase(module, std::move(group), std::move(options)), module_(std::move(module)) {}
  DistributedDataParallel(const torch::nn::ModuleHolder<Wrapped>& module, std::shared_ptr<Group> group,
                          DistributedDataParallelOptions options = {})
      : DistributedDataParallel(module.ptr(), std::move(group), std::move(options)) {}

  /// Calls the module's forward, with any arguments and result. With find_unused_parameters or static_graph the result
  /// must have a type whose tensors can be found (tensors_in.h).
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    before_forward();
    auto outputs = module_->forward(std::forward<Arguments>(arguments)...);
    after_forward(tensors_in(outputs), TensorsIn<decltype(outputs)>::value);
    return outputs;
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// The wrapped module: for evaluation, and for checkpoints that load without DistributedDataParallel.
  const std::shared_ptr<Wrapped>& module() const { return module_; }

 private:
  std::shared_ptr<Wrapped> module_;
};

template <class M>
DistributedDataParallel(std::shared_ptr<M>, std::shared_ptr<Group>, DistributedDataParallelOptions = {})
    -> DistributedDataParallel<M>;
template <class Holder, class = typename Holder::ContainedType>
DistributedDataParallel(const Holder&, std::shared_ptr<Group>, DistributedDataParallelOptions = {})
    -> DistributedDataParallel<typename Holder::ContainedType>;

}  // namespace muster::nn
