// Process groups whose members change, from torch 2.14 on.
#include "muster/torch/backend.h"

#if MUSTER_TORCH_HAS_RECONFIGURE
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "muster/base/hash.h"
#include "muster/base/random.h"
#include "muster/torch/c10d/arguments.h"
#include "muster/torch/c10d/gil_release.h"
#include "muster/torch/store.h"

namespace muster {
namespace {

constexpr const char* kReconfigure = "reconfigure";
/// How long pending Works may go on: a peer may still take part in the last collective.
constexpr std::chrono::seconds kPendingTime(1);

/// In the order of ranks, which is the same at all ranks.
std::vector<c10d::ReconfigureHandle> in_order(const c10d::ReconfigureOptions& options) {
  if (const auto* const ordered = std::get_if<std::vector<c10d::ReconfigureHandle>>(&options.handles)) return *ordered;
  const auto& unordered = std::get<std::unordered_set<c10d::ReconfigureHandle>>(options.handles);
  std::vector<c10d::ReconfigureHandle> sorted(unordered.begin(), unordered.end());
  std::ranges::sort(sorted);
  return sorted;
}

}  // namespace

c10d::ReconfigureHandle ProcessGroupMuster::new_handle() {
  std::array<uint8_t, 12> drawn;
  fill_secure_random(drawn);
  return "muster-" + to_hex(drawn);
}

c10::intrusive_ptr<ProcessGroupMuster> ProcessGroupMuster::create_unformed(const c10::intrusive_ptr<c10d::Store>& store,
                                                                           const GroupSpec& membership,
                                                                           const GroupOptions& options,
                                                                           Callbacks callbacks) {
  GroupSpec alone = membership;
  alone.rank = 0;
  alone.size = 1;
  std::unique_ptr<Group> none = value_or_throw(Group::form(*memory_store(), alone, options));
  none->abort({ErrorCode::kAborted, "the process group was made with enable_reconfigure: call reconfigure() first"});
  const auto timeout = std::chrono::duration_cast<Milliseconds>(options.timeout);
  auto backend =
      c10::make_intrusive<ProcessGroupMuster>(store_over_c10d(store), std::move(none), timeout, std::move(callbacks));
  backend->rank_ = membership.rank;
  backend->size_ = membership.size;
  if (backend->callbacks_.created) backend->callbacks_.created(backend);
  return backend;
}

ProcessGroupMuster::Handle ProcessGroupMuster::reconfigure(const c10d::ReconfigureOptions& options) {
  const GilRelease no_gil;
  if (getpid() != process_) {
    throw_error({ErrorCode::kUnsupported, c10::str(kReconfigure, ": the process group is the parent's")});
  }
  if (!supportsReconfigure()) {
    throw_error({ErrorCode::kUnsupported, c10::str(kReconfigure, ": a group over MPI has the ranks of the job only")});
  }
  const std::vector<c10d::ReconfigureHandle> handles = in_order(options);
  const c10d::ReconfigureHandle& own_handle = reconfiguration_.handle;
  const auto own = std::ranges::find(handles, own_handle);
  check_argument(own != handles.end(), kReconfigure, "this process group's handle, ", own_handle, ", is not among the ",
                 handles.size(), " handles");
  check_argument(std::ranges::count(handles, own_handle) == 1, kReconfigure, "the handle ", own_handle,
                 " is listed twice");
  check_argument(reconfiguration_.used_uuids.insert(options.uuid).second, kReconfigure, "uuid ", options.uuid,
                 " was already used: pass a new one each time");

  end_group(kPendingTime, "the process group is being reconfigured");
  if (auto on_device = device_group_->release()) release_group(nullptr, std::move(on_device->group));

  std::string members;  // ranks with other handles form another group
  for (const auto& each : handles) members += each + ' ';
  const GroupSpec spec{static_cast<Rank>(own - handles.begin()), static_cast<int>(handles.size()),
                       c10::str("reconfigured-", options.uuid, '-', fnv1a(members)), group_->membership().generation};
  GroupOptions group_options = group_->options();
  group_options.timeout = timeout_or_default(options.timeout.value_or(Milliseconds::zero()));
  std::unique_ptr<Group> formed = value_or_throw(Group::form(*store_, spec, group_options));
  value_or_throw(formed->set_timeout(timeout_.load()));

  auto on_device = std::make_unique<LazyDeviceGroup>(*formed);
  reconfiguration_.former_groups.push_back(
      {std::exchange(group_, std::move(formed)), std::exchange(device_group_, std::move(on_device))});
  rank_ = group_->membership().rank;
  size_ = group_->membership().size;
  splits_ = 0;
  auto done = c10::make_intrusive<TensorWork>(
      rank_, TensorRequest(OpType::UNKNOWN, "muster:reconfigure", /*async=*/true), at::TensorList(),
      std::make_shared<PendingWorks>());  // of its own: it is no operation for the completion hook
  TensorWork::launch(done, *group_, {.timeout = timeout_.load(), .async = true});
  return done;
}

}  // namespace muster
#endif
