#include "muster/torch/c10d/device_group.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>
#include <utility>

#include "muster/base/log.h"
#include "muster/nccl/group.h"
#include "muster/torch/c10d/staging.h"
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

}  // namespace

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

}  // namespace muster
