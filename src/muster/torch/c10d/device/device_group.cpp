#include "muster/torch/c10d/device/device_group.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "muster/base/environment.h"
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

  void make_current() override { (void)exchange_device(device_); }
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

Result<std::unique_ptr<Group>> form_over_nccl(std::shared_ptr<Group> links, c10::Device device) {
  const c10::DeviceGuard here(device);  // NCCL takes the thread's current device
  return nccl::form_group(std::move(links), std::make_shared<TorchDevice>(device));
}
#else
Result<std::unique_ptr<Group>> form_over_nccl(std::shared_ptr<Group>, c10::Device) {
  return fail(ErrorCode::kUnsupported,
              "MUSTER_NCCL_LIBRARY needs torch 2.13 or newer; without the variable, tensors on a device go through the "
              "host");
}
#endif

}  // namespace

DeviceGroup* LazyDeviceGroup::for_device(c10::Device device) {
  const GilRelease no_gil;
  const std::lock_guard forming(forming_);
  if (!group_) {
    if (is_capturing(device)) {
      throw_error({ErrorCode::kInvalidArgument,
                   "the first call with tensors on a device connects the ranks, which a graph cannot capture: make one "
                   "before the capture"});
    }
    auto formed = form(device);
    const std::lock_guard lock(mutex_);
    group_ = std::move(formed);
  }
  if (!*group_) throw_error(group_->error());
  return group_->value().get();
}

/// Collective over the host's group, if NCCL is asked for.
Result<std::unique_ptr<DeviceGroup>> LazyDeviceGroup::form(c10::Device device) {
  if (!is_set("MUSTER_NCCL_LIBRARY") || host_.transport() == "mpi") return nullptr;
  MUSTER_ASSIGN(std::shared_ptr<Group> links, host_.duplicate("device"));
  {
    const std::lock_guard lock(mutex_);
    links_ = links;
  }
  MUSTER_TRY(host_.status());  // it may have been aborted meanwhile
  MUSTER_ASSIGN(std::unique_ptr<Group> group, form_over_nccl(std::move(links), device));
  if (host_.membership().rank == 0) {
    log(LogLevel::kInfo, c10::str("collectives of tensors on ", device.type(), " run over NCCL"));
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  return std::make_unique<DeviceGroup>(DeviceGroup{std::move(group), guard.getStreamFromGlobalPool(device)});
}

Group* LazyDeviceGroup::formed() const {
  const std::lock_guard lock(mutex_);
  const DeviceGroup* const there = group_ && *group_ ? group_->value().get() : nullptr;
  return there != nullptr ? there->group.get() : nullptr;
}

void LazyDeviceGroup::abort(const Error& why) {
  if (Group* const group = formed()) return group->abort(why);
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Group> links = links_.lock();
  lock.unlock();
  if (links) links->abort(why);
}

std::unique_ptr<DeviceGroup> LazyDeviceGroup::release() {
  const std::lock_guard lock(mutex_);
  return group_ && *group_ ? std::move(group_->value()) : nullptr;
}

}  // namespace muster
