// The public functions of a Reducer. They call the state machine (reducer_impl.h), most of them with its lock held.
#include "muster/torch/reducer/reducer.h"

#include <ATen/ATen.h>

#include "muster/torch/reducer/reducer_impl.h"

namespace muster {

/// Access to the implementation. Holds the lock until the end of the full expression or of the scope.
class Reducer::Locked {
 public:
  explicit Locked(const Reducer& reducer) : impl_(*reducer.impl_), lock_(impl_.mutex) {}
  Impl* operator->() const { return &impl_; }

 private:
  Impl& impl_;
  const std::lock_guard<std::mutex> lock_;
};

Reducer::Reducer(std::shared_ptr<Group> group, std::vector<at::Tensor> parameters, ReducerOptions options)
    : impl_(std::make_shared<Impl>(std::move(group), std::move(parameters), std::move(options))) {
  impl_->hooks.attach(*impl_, [weak = std::weak_ptr<Impl>(impl_)](size_t index) {
    if (const auto impl = weak.lock()) impl->on_gradient(index);
  });
}

Reducer::~Reducer() {
  const Locked impl(*this);
  impl->phase = Impl::Phase::kClosed;
  impl->hooks.detach();
}

void Reducer::remove_hooks() { impl_->hooks.detach(); }
void Reducer::prepare_for_forward() {
  if (Group* const on_device = impl_->device_group()) value_or_throw(on_device->status());  // of the last backward
  impl_->clock.begin_forward();
}
void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) { Locked(*this)->prepare(outputs); }
bool Reducer::rebuild_buckets() { return Locked(*this)->rebuild_buckets(); }

void Reducer::set_hook(std::unique_ptr<c10d::CommHookInterface> hook, std::vector<std::shared_ptr<Group>> groups) {
  const Locked impl(*this);
  TORCH_CHECK(!impl->reductions.hook(), "register_comm_hook or register_builtin_comm_hook can only be called once.");
  impl->check_finished();
  impl->reductions.set_hook(std::move(hook), std::move(groups));
  if (!impl->reductions.aligns_gradients()) impl->build_buckets(impl->buckets.plan());
}

void Reducer::set_static_graph() {
  using Phase = Impl::Phase;
  const Locked impl(*this);
  TORCH_CHECK(impl->clock.last().iteration == 0 && (impl->phase == Phase::kIdle || impl->phase == Phase::kArmed),
              "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
              "constructed.");
  impl->options.static_graph = true;
}

void Reducer::delay_all_reduce() { impl_->reduce_first_static_iteration(); }
void Reducer::set_optimizer_in_backward() { impl_->options.optimizer_in_backward = true; }

void Reducer::set_reduction_dtype(at::ScalarType dtype) {
  const Locked impl(*this);
  impl->options.reduction_dtype = dtype;
  impl->build_buckets(impl->buckets.plan());
}

void Reducer::wait_at_end(HookFuture future) { impl_->reductions.wait_at_end(std::move(future)); }

void Reducer::set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_initial) {
  if (!divide_by_initial) Locked(*this)->reductions.join_scale().divide_by_result_of(std::move(work));
}

void Reducer::shadow_backward() {
  const Locked impl(*this);
  impl->guarded([&] { impl->shadow_backward(); });
}

void Reducer::divide_once_by(int ranks) {
  const Locked impl(*this);
  impl->reductions.join_scale().divide_by(ranks, impl->size());
}

at::Tensor Reducer::used_map() const { return impl_->used.counts(); }
bool Reducer::in_first_static_iteration() const { return impl_->in_first_static_iteration(); }
bool Reducer::graph_is_static() const { return impl_->options.static_graph || !impl_->used.has_changed(); }
void Reducer::check_finished() const { Locked(*this)->check_finished(); }
std::string Reducer::last_error() const { return Locked(*this)->error; }
void Reducer::note_error(std::string text) { Locked(*this)->error = std::move(text); }
void Reducer::reset() { Locked(*this)->reset(); }

void Reducer::set_group(std::shared_ptr<Group> group, LazyDeviceGroup* device_group) {
  const Locked impl(*this);
  impl->reset();
  impl->phase = Impl::Phase::kIdle;
  impl->agreement.reset();
  impl->group = std::move(group);
  impl->options.device_group = device_group;
  impl->build_buckets(impl->buckets.plan());  // new buffers, in memory that the new group's ranks share
}

std::vector<std::vector<size_t>> Reducer::bucket_parameters() const { return impl_->buckets.plan(); }
std::vector<size_t> Reducer::bucket_bytes() const { return impl_->buckets.bytes(); }
const BackwardTimes& Reducer::times() const { return impl_->clock.last(); }
const StepHistory& Reducer::history() const { return impl_->clock.history(); }
Group& Reducer::group() const { return *impl_->group; }
const std::vector<std::string>& Reducer::names() const { return impl_->options.names; }

}  // namespace muster
