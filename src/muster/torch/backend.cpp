#include "muster/torch/backend.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include "muster/torch/c10d/allocator.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/c10d/sync_call.h"
#include "muster/torch/store.h"

namespace muster {

c10::intrusive_ptr<ProcessGroupMuster> ProcessGroupMuster::create(const c10::intrusive_ptr<c10d::Store>& store,
                                                                  const GroupSpec& membership, Milliseconds timeout,
                                                                  std::shared_ptr<Arena> arena, Callbacks callbacks) {
  GroupOptions options = value_or_throw(group_options_from_environment());
  options.timeout = timeout;
  options.arena = std::move(arena);
  return create(store, membership, options, std::move(callbacks));
}

c10::intrusive_ptr<ProcessGroupMuster> ProcessGroupMuster::create(const c10::intrusive_ptr<c10d::Store>& store,
                                                                  const GroupSpec& membership,
                                                                  const GroupOptions& options, Callbacks callbacks) {
  const auto timeout = std::chrono::duration_cast<Milliseconds>(options.timeout);
  std::unique_ptr<Store> adapted = store_over_c10d(store);
  std::unique_ptr<Group> group = value_or_throw(Group::form(*adapted, membership, options));
  auto backend = c10::make_intrusive<ProcessGroupMuster>(std::move(adapted), std::move(group), timeout, callbacks);
  if (callbacks.created) callbacks.created(backend);
  return backend;
}

ProcessGroupMuster::ProcessGroupMuster(std::unique_ptr<Store> store, std::unique_ptr<Group> group, Milliseconds timeout,
                                       Callbacks callbacks)
    : Backend(group->membership().rank, group->membership().size),
      store_(std::move(store)),
      group_(std::move(group)),
      timeout_(timeout),
      callbacks_(std::move(callbacks)),
      process_(getpid()) {}

void ProcessGroupMuster::release_resources() {
  if (!group_) return;  // released before
  const std::unique_ptr<DeviceGroup> on_device = device_group_->release();
  if (getpid() != process_) {
    static_cast<void>(store_.release());  // it is the parent's, as are the groups (base/process_owned.h)
    reconfiguration_.former_groups.clear();
    group_.reset();
    return;
  }
  if (on_device) release_group(nullptr, std::move(on_device->group));
  for (Former& each : reconfiguration_.former_groups) release_group(nullptr, std::move(each.group));
  release_group(std::move(store_), std::move(group_));
}

void ProcessGroupMuster::release_group(std::unique_ptr<Store> store, std::unique_ptr<Group> group) {
  if (callbacks_.released) return callbacks_.released(std::move(store), std::move(group));
  group.reset();  // before the store
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupMuster::getBackendOptions() {
  auto options = c10::make_intrusive<Options>("muster", timeout_.load());
  options->group_name = group_->membership().name;
  return options;
}

void ProcessGroupMuster::setTimeout(Milliseconds timeout) {
  check_argument(timeout.count() > 0, "set_timeout", "the timeout must be > 0");
  timeout_ = timeout;
  value_or_throw(group_->set_timeout(timeout));
}

ProcessGroupMuster::Handle ProcessGroupMuster::launch(TensorRequest&& request, at::TensorList inputs,
                                                      Milliseconds timeout) {
  if (coalescing()) {
    block_.joined = true;
    block_.work->request().join(std::move(request));
    return block_.work;
  }
  const bool on_device = request.device_group != nullptr;
  const CallOptions options{.timeout = timeout_or_default(timeout), .async = request.async || on_device};
  if (on_device && !request.async) {
    const auto work = c10::make_intrusive<TensorWork>(rank_, std::move(request), inputs, pending_);
    TensorWork::launch(work, *group_, options);
    work->wait();
    return nullptr;
  }
  if (request.async) {
    auto work = c10::make_intrusive<TensorWork>(rank_, std::move(request), inputs, pending_);
    TensorWork::launch(work, *group_, options);
    return work;
  }
  SyncCallScope scope(*this, request, inputs);
  const muster::Work work = request.submit(*group_, options);
  const Result<> result = work.wait();
  if (result) request.copy_back();
  scope.end(result, work.sequence());
  return nullptr;
}

TensorRequest ProcessGroupMuster::request_in_block(OpType type, const char* title) {
  TensorRequest request(type, title, /*async=*/true);
  block_.joined = false;
  request.block_guard = std::shared_ptr<void>(nullptr, [this](void*) {
    if (!block_.joined) cancelCoalescing();
  });
  return request;
}

void ProcessGroupMuster::startCoalescing() {
  std::thread::id none;
  check_argument(block_.thread.compare_exchange_strong(none, std::this_thread::get_id()), "start_coalescing",
                 "this process group has an open coalescing block already");
  block_.work = c10::make_intrusive<TensorWork>(
      rank_, TensorRequest(OpType::COALESCED, "muster:coalesced", /*async=*/true), at::TensorList(), pending_);
}

ProcessGroupMuster::Handle ProcessGroupMuster::endCoalescing() {
  check_argument(coalescing(), "end_coalescing", "this thread has no open coalescing block");
  const auto block = std::move(block_.work);
  block_.thread = std::thread::id();  // last: now another thread may open a block
  TensorWork::launch(block, *group_, {.timeout = timeout_.load(), .async = true});
  return block;
}

void ProcessGroupMuster::cancelCoalescing() {
  if (!coalescing()) return;
  const auto block = std::move(block_.work);
  block_.thread = std::thread::id();
  block->cancel({ErrorCode::kAborted, "the coalescing block was canceled because one of its calls failed", rank_});
}

ProcessGroupMuster::Handle ProcessGroupMuster::barrier(const c10d::BarrierOptions& options) {
  TensorRequest request = this->request(OpType::BARRIER, "muster:barrier", options.asyncOp);
  request.add(Collective::kBarrier, {}, {});
  return launch(std::move(request), {}, options.timeout);
}

at::Tensor ProcessGroupMuster::allocateTensor(long size, at::TensorOptions options) {  // NOLINT: c10d's type
  constexpr const char* kTitle = "allocate_tensor";
  check_argument(size >= 0, kTitle, "size must be >= 0, got ", size);
  check_argument(options.device().is_cpu(), kTitle, "allocates CPU tensors only, got device ", options.device());
  const std::shared_ptr<Arena> arena = group_->arena();
  return arena ? empty_in(arena, size, options) : at::empty({size}, options);
}

std::shared_ptr<c10::Allocator> ProcessGroupMuster::getMemAllocator() {
  const std::shared_ptr<Arena> arena = group_->arena();
  if (arena == nullptr) throw_error({ErrorCode::kUnsupported, "the ranks of this group share no memory"});
  return arena_allocator(arena);
}

void ProcessGroupMuster::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const ProfilerEvent event("muster:monitored_barrier", {});
  if (options.timeout.count() == 0) {  // 0 is an expired deadline here; other calls use the default timeout for 0
    throw_error({ErrorCode::kTimeout, c10::str("Rank ", rank_, " timed out in monitoredBarrier after 0 ms"), rank_});
  }
  value_or_throw(group_->monitored_barrier(*store_, timeout_or_default(options.timeout), wait_all_ranks));
}

}  // namespace muster
