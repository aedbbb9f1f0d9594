#include "muster/torch/c10d/device/device_group.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <utility>

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
    explicit TorchEvent(c10::Device where) : device(where), event(where.type()) { event.record(current_stream(where)); }
    bool reached() override {
      const RelaxedCaptureMode relaxed(device);
      return event.query();
    }
    const c10::Device device;
    c10::Event event;
  };
  const c10::Device device_;
};

bool is_asked_for() {
  const char* const library = std::getenv("MUSTER_NCCL_LIBRARY");
  return library != nullptr && *library != '\0';
}

bool has_library() {
  const auto library = nccl::Library::get();
  if (!library) log(LogLevel::kWarning, "tensors on a device go through the host: " + library.error().to_string());
  return library.has_value();
}
#endif

#if MUSTER_TORCH_HAS_NATIVE_STREAMS
Result<std::unique_ptr<Group>> form_over_nccl(Group& host, c10::Device device) {
  MUSTER_ASSIGN(std::unique_ptr<Group> own, host.duplicate("device"));
  return nccl::form_group(std::move(own), std::make_shared<TorchDevice>(device));
}
#endif

/// Collective over `host`, if NCCL is asked for: at all ranks, or at none.
std::unique_ptr<DeviceGroup> form_device_group(Group& host, c10::Device device) {
#if MUSTER_TORCH_HAS_NATIVE_STREAMS
  if (!is_asked_for()) return nullptr;
  uint8_t usable = has_library() ? 1 : 0;
  value_or_throw(host.all_reduce({&usable, 1, Dtype::kUint8}, ReduceOp::kMin).wait());
  if (usable != 0) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::DeviceGuard here(device);  // NCCL takes the thread's current device
    const bool is_first = host.membership().rank == 0;
    auto group = form_over_nccl(host, device);
    uint8_t formed = group ? 1 : 0;  // all ranks have the group, or none
    const Result<> agreed = host.all_reduce({&formed, 1, Dtype::kUint8}, ReduceOp::kMin).wait();
    if (!group) throw_error(group.error());
    value_or_throw(agreed);
    if (formed == 0) throw_error({ErrorCode::kUnavailable, "another rank could not form the group over NCCL"});
    if (is_first) log(LogLevel::kInfo, c10::str("collectives of tensors on ", device.type(), " run over NCCL"));
    return std::make_unique<DeviceGroup>(DeviceGroup{std::move(*group), guard.getStreamFromGlobalPool(device)});
  }
#endif
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
  auto formed = form_device_group(host_, device);
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
