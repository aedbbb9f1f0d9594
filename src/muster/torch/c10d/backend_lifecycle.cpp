// Completion hooks, abort and shutdown of a process group, and groups that are made from it.
#include <unistd.h>

#include <numeric>

#include "muster/torch/backend.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/store.h"

namespace muster {
namespace {

/// How long Works may take to end, before they are aborted in shutdown(), and after they are aborted.
constexpr std::chrono::seconds kGrace(10);

}  // namespace

void ProcessGroupMuster::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  onCompletionHook_ = hook;  // for hasHooks()
  pending_->set_hook(std::move(hook));
}

void ProcessGroupMuster::waitForPendingWorks() {
  // The loop ends, because every operation ends by its own deadline.
  while (!pending_->drain(timeout_)) continue;
}

c10d::ErrorType ProcessGroupMuster::getError() {
  Result<> status = group_->status();
  if (Group* const on_device = device_group_->formed(); status && on_device != nullptr) status = on_device->status();
  if (status) return c10d::ErrorType::SUCCESS;
  if (status.error().code == ErrorCode::kTimeout) return c10d::ErrorType::TIMEOUT;
  return status.error().code == ErrorCode::kPeerLost ? c10d::ErrorType::REMOTE_ERROR : c10d::ErrorType::COMM_ERROR;
}

void ProcessGroupMuster::abort() {
  abort_groups({ErrorCode::kAborted, "the process group was aborted by its user", rank_});
}

void ProcessGroupMuster::abort_groups(const Error& why) {
  group_->abort(why);
  device_group_->abort(why);
}

void ProcessGroupMuster::shutdown() {
  if (getpid() != process_) return;
  // The other ranks may need the operations that are still pending here, but shutdown must not take long.
  end_group(kGrace, "the process group was shut down with operations pending");
}

void ProcessGroupMuster::end_group(std::chrono::seconds grace, const char* why) {
  if (!pending_->drain(grace)) {
    abort_groups({ErrorCode::kAborted, why, rank_});
    pending_->drain(kGrace);
  }
  if (Group* const on_device = device_group_->formed()) on_device->leave();
  group_->leave();  // needed because a model or a hook may still hold the group
}

/// The timeout of a group made from this one. Checked before that group is formed.
ProcessGroupMuster::Milliseconds ProcessGroupMuster::timeout_of(const c10::intrusive_ptr<Options>& options) const {
  if (!options) return timeout_.load();
  check_argument(options->timeout.count() > 0, "process group", "the timeout must be > 0, got ",
                 options->timeout.count(), " ms");
  return options->timeout;
}

/// Returns null if this rank is not a member of the new group.
c10::intrusive_ptr<ProcessGroupMuster> ProcessGroupMuster::wrap_child_group(std::unique_ptr<Store> store,
                                                                            Result<std::unique_ptr<Group>> formed,
                                                                            Milliseconds timeout) const {
  std::unique_ptr<Group> group = value_or_throw(std::move(formed));
  if (group == nullptr) return nullptr;
  value_or_throw(group->set_timeout(timeout));
  auto backend = c10::make_intrusive<ProcessGroupMuster>(std::move(store), std::move(group), timeout, callbacks_);
  if (callbacks_.created) callbacks_.created(backend);
  return backend;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMuster::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                            const std::vector<int>& ranks,
                                                            const c10::intrusive_ptr<Options>& options) {
  const Milliseconds timeout = timeout_of(options);
  const std::string name = c10::str(options ? options->group_name : "split", '.', splits_++);
  auto adapted = store_over_c10d(store);
  auto group = group_->split(*adapted, std::vector<Rank>(ranks.begin(), ranks.end()), name);
  return wrap_child_group(std::move(adapted), std::move(group), timeout);
}

c10::intrusive_ptr<ProcessGroupMuster> ProcessGroupMuster::duplicate() {
  std::vector<Rank> ranks(group_->membership().size);
  std::iota(ranks.begin(), ranks.end(), 0);
  auto store = value_or_throw(store_->clone());
  auto group = group_->split(*store, ranks, c10::str("duplicate.", splits_++));
  return wrap_child_group(std::move(store), std::move(group), timeout_.load());
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMuster::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                            const c10::intrusive_ptr<Options>& options, const int& rank,
                                                            const int& size) {
  const Milliseconds timeout = timeout_of(options);
  check_argument(size > 0 && rank >= 0 && rank < size, "merge", "rank ", rank, " is out of range for world size ",
                 size);
  auto adapted = store_over_c10d(store);
  const std::string name = options ? options->group_name : "merged";
  auto group = group_->merge(*adapted, {rank, size, name, group_->membership().generation});
  return wrap_child_group(std::move(adapted), std::move(group), timeout);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMuster::shrink(const std::vector<int64_t>& excluded, int flags,
                                                             const c10::intrusive_ptr<Options>& options) {
  constexpr int kAbort = 1;  // torch.distributed.SHRINK_ABORT
  const Milliseconds timeout = timeout_of(options);
  auto store = value_or_throw(store_->clone());
  auto group = group_->shrink(*store, std::vector<Rank>(excluded.begin(), excluded.end()), (flags & kAbort) != 0);
  if (group && (flags & kAbort) != 0) device_group_->abort({ErrorCode::kAborted, "the group was shrunk", rank_});
  return wrap_child_group(std::move(store), std::move(group), timeout);
}

}  // namespace muster
