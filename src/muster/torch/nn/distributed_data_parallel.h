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

/// Named as those of PyTorch's DistributedDataParallel (Python), and they mean the same. Equal at all ranks.
struct DistributedDataParallelOptions {
  double bucket_cap_mb = 25;               ///< MiB of gradients that are reduced together
  double first_bucket_mb = 1;              ///< of the bucket that fills first: small, so that reduction starts early
  std::vector<double> bucket_cap_mb_list;  ///< of the first buckets instead, the last for all others
  bool find_unused_parameters = false;     ///< for a forward that does not use all parameters each time
  bool gradient_as_bucket_view = true;     ///< gradients lie in the buckets; false (torch's default): one copy more
  bool static_graph = false;               ///< the same parameters are used, as often, in each iteration
  bool skip_all_reduce_unused_parameters = false;
  bool init_sync = true;          ///< modules are compared, then rank 0's values go to all
  bool broadcast_buffers = true;  ///< rank 0's buffers go to all before each forward
};

struct JoinOptions {
  /// Gradients are averaged over all ranks of the group, to which those without data contribute zeros; false: over the
  /// ranks that have data.
  bool divide_by_initial_world_size = true;
};

/// What DistributedDataParallel is, whatever module it wraps.
class DistributedDataParallelBase : public torch::nn::Module {
 public:
  /// While one lives, backward only adds to this rank's gradients. It counts when forward is called: the first
  /// forward and backward without one reduces what has gathered.
  ///
  ///   { auto quiet = ddp.no_sync(); loss_of(ddp, first).backward(); }
  ///   loss_of(ddp, second).backward();  // averages the sum of both
  class [[nodiscard]] NoSync {
   public:
    ~NoSync() { model_.synchronises_ = before_; }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    friend class DistributedDataParallelBase;
    explicit NoSync(DistributedDataParallelBase& model)
        : model_(model), before_(std::exchange(model.synchronises_, false)) {}
    DistributedDataParallelBase& model_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(*this); }

  /// Collective, for ranks with different numbers of batches: `train` goes through this rank's, and a rank that is
  /// through takes part in the others' steps, with zeros in its gradients' place, until all are. `update` is what
  /// follows a backward, such as the optimizer's step: it also runs after each of the others' backwards, so parameters
  /// and the state of optimizers stay alike at all ranks.
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
  /// Each forward outside no_sync() must be followed by its backward, and there may be no other collectives than
  /// `update`'s. Each forward costs a small exchange. If `train` throws, so does this, at once. Throws c10::ValueError
  /// with skip_all_reduce_unused_parameters: who has no data cannot know what the others skip.
  void join(const std::function<void()>& train, const std::function<void()>& update, JoinOptions options = {});

  using Hook = std::function<c10::intrusive_ptr<c10::ivalue::Future>(c10d::GradBucket&)>;
  /// In place of the all-reduce, for each bucket; the future's tensor is the result, already averaged. Once, before the
  /// first forward, alike at all ranks. The second form is for hooks with more to say, such as those of torch/hooks.h.
  void register_comm_hook(Hook hook);
  void register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook);

  const std::shared_ptr<Group>& group() const { return group_; }
  muster::Reducer& reducer() { return *reducer_; }
  const DistributedDataParallelOptions& options() const { return options_; }

  /// Throws c10::NotImplementedError: hooks and buckets belong to one module. Clone what is wrapped, and wrap the copy.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;

 protected:
  DistributedDataParallelBase(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Group> group,
                              DistributedDataParallelOptions options);

  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs, bool outputs_known);

 private:
  /// What a rank in join() is about to do, from nothing more to most.
  enum class Step : uint8_t { kNone, kForward, kBackward };

  bool will_reduce() const;
  Step meet(Step mine);
  void begin_step(bool reduces);

  std::shared_ptr<Group> group_;  // shared with whoever else uses it
  DistributedDataParallelOptions options_;
  std::vector<at::Tensor> buffers_to_sync_;
  std::unique_ptr<muster::Reducer> reducer_;
  bool synchronises_ = true;       ///< no NoSync lives
  bool buffers_are_stale_ = true;  ///< forwards under NoSync keep each rank's own
  Rank source_ = 0;                ///< of buffers: the first rank, in join() the first that has data
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

/// Data parallelism: every rank holds the module, computes on its part of each batch, and backward leaves at all ranks
/// the average of their gradients, reduced while it still runs (muster::Reducer). `M` is a module's class or its
/// holder's:
///
///   Net net;  // TORCH_MODULE(Net), or std::make_shared<NetImpl>()
///   muster::nn::DistributedDataParallel ddp(net, group);
///   torch::optim::SGD optimizer(ddp.parameters(), 0.1);
///   cross_entropy(ddp.forward(images), digits).backward();
///   optimizer.step();
///
/// A torch::nn::Module itself, with what it wraps as its child "module". Move and convert the module before it is
/// wrapped, and do not add parameters later. Every rank constructs it and calls forward and backward alike; a module
/// that differs by rank throws ErrorException, which names the parameter or buffer and the rank. Wrong use throws
/// c10::Error. Not thread-safe.
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

  /// The module's own, with any arguments and result. With find_unused_parameters or static_graph the result must be of
  /// a type whose tensors are found (tensors_in.h).
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

  /// What is wrapped: for evaluation, and for checkpoints that others can load.
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
