#include "muster/torch/c10d/device/device_group.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <numeric>
#include <utility>
#include <vector>

#include "muster/base/log.h"
#include "muster/nccl/group.h"
#include "muster/torch/c10d/device/staging.h"
#include "muster/torch/c10d/gil_release.h"
#include "muster/torch/c10d/torch_versions.h"
#include "muster/torch/exception.h"

namespace muster {
namespace {

#if MUSTER_TORCH_HAS_NATIVE_STREAMS
/// The runtime of a device of torch.
class TorchDevice final : public nccl::Device {
 public:
  explicit TorchDevice(c10::Device device) : device_(device) {}

  nccl::Stream stream() override {
    return c10::impl::VirtualGuardImpl(device_.type()).getStreamNativeHandle(current_stream(device_));
  }
  bool capturing() override { return is_capturing(device_); }
  std::unique_ptr<Event> record() override { return std::make_unique<TorchEvent>(device_); }
  std::shared_ptr<void> allocate(size_t bytes) override {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
    const at::Tensor memory = at::empty({static_cast<int64_t>(bytes)}, options);
    return {memory.data_ptr(), [memory](void*) {}};
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    const at::NoGradGuard no_grad;
    bytes_at(to, bytes, device_).copy_(bytes_at(const_cast<void*>(from), bytes, device_), /*non_blocking=*/true);
  }

 private:
  struct TorchEvent final : Event {
    explicit TorchEvent(c10::Device device) : event(device.type()) { event.record(current_stream(device)); }
    bool reached() override { return event.query(); }
    c10::Event event;
  };
  const c10::Device device_;
};

bool has_library() {
  const char* const named = std::getenv("MUSTER_NCCL_LIBRARY");
  if (named == nullptr || *named == '\0') return false;
  const auto library = nccl::Library::get();
  if (!library) log(LogLevel::kWarning, "tensors on a device go through the host: " + library.error().to_string());
  return library.has_value();
}
#endif

/// Collective over `host`; the new group owns it and `store`.
std::unique_ptr<DeviceGroup> form_device_group(std::unique_ptr<Store> store, std::unique_ptr<Group> host,
                                               c10::Device device) {
#if MUSTER_TORCH_HAS_NATIVE_STREAMS
  uint8_t usable = has_library() ? 1 : 0;
  value_or_throw(host->all_reduce({&usable, 1, Dtype::kUint8}, ReduceOp::kMin).wait());
  if (usable != 0) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::DeviceGuard here(device);  // NCCL takes the thread's current device
    const bool is_first = host->membership().rank == 0;
    auto formed = nccl::form_group(std::move(host), std::make_shared<TorchDevice>(device));
    auto group = value_or_throw(std::move(formed));
    if (is_first) log(LogLevel::kInfo, c10::str("collectives of tensors on ", device.type(), " run over NCCL"));
    return std::make_unique<DeviceGroup>(
        DeviceGroup{std::move(store), std::move(group), guard.getStreamFromGlobalPool(device)});
  }
#endif
  (void)store;
  (void)host;
  (void)device;
  return nullptr;
}

}  // namespace

DeviceGroup* LazyDeviceGroup::for_device(c10::Device device) {
  const GilRelease no_gil;
  const std::lock_guard forming(forming_);
  if (group_) return group_->get();
  if (is_capturing(device)) {
    throw_error({ErrorCode::kInvalidArgument,
                 "the first call with tensors on a device connects the ranks, which a graph cannot capture: make one "
                 "before the capture"});
  }
  std::vector<Rank> ranks(static_cast<size_t>(host_.membership().size));
  std::iota(ranks.begin(), ranks.end(), 0);
  auto store = value_or_throw(store_.clone());
  auto host = value_or_throw(host_.split(*store, ranks, "device"));
  auto formed = form_device_group(std::move(store), std::move(host), device);
  const std::lock_guard lock(mutex_);
  group_ = std::move(formed);
  // The group of the host may have been aborted meanwhile.
  if (const Result<> open = host_.status(); !open && *group_) (*group_)->group->abort(open.error());
  return group_->get();
}

Group* LazyDeviceGroup::formed() const {
  const std::lock_guard lock(mutex_);
  return group_ && *group_ ? (*group_)->group.get() : nullptr;
}

std::unique_ptr<DeviceGroup> LazyDeviceGroup::release() {
  const std::lock_guard lock(mutex_);
  return group_ ? std::move(*group_) : nullptr;
}

}  // namespace muster
