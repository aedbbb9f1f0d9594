#include "muster/torch/c10d/device/staging.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <string>

#include "muster/torch/c10d/torch_versions.h"

namespace muster {
namespace {

/// torch pins memory for one kind of device in a process.
bool can_pin() {
  static const bool can = [] {
    try {
      return at::empty({1}, at::TensorOptions().dtype(at::kByte).pinned_memory(true)).is_pinned();
    } catch (const c10::Error&) {
      return false;  // such as a device that has no such memory
    }
  }();
  return can;
}

using ExchangeMode = int(int* mode);
constexpr int kRelaxedMode = 2;  ///< cudaStreamCaptureModeRelaxed

/// cudaThreadExchangeStreamCaptureMode, or ROCm's, which torch calls CUDA, too. Null if the device has none.
ExchangeMode* exchange_mode(c10::DeviceType type) {
  static const c10::DeviceType known = type;  // torch has one type of accelerator in a process
  static auto* const found = [] {
    const std::string name = "ThreadExchangeStreamCaptureMode";
    void* function = dlsym(RTLD_DEFAULT, (c10::DeviceTypeName(known, /*lower_case=*/true) + name).c_str());
    if (function == nullptr && known == c10::kCUDA) function = dlsym(RTLD_DEFAULT, ("hip" + name).c_str());
    return reinterpret_cast<ExchangeMode*>(function);
  }();
  return type == known ? found : nullptr;
}

c10::impl::VirtualGuardImpl guard_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

}  // namespace

c10::Stream current_stream(c10::Device device) { return guard_of(device).getStream(device); }

void wait_for_stream(c10::Device device) {
  const RelaxedCaptureMode relaxed(device);
  guard_of(device).synchronizeStream(current_stream(device));
}

bool is_capturing(c10::Device device) {
#if MUSTER_TORCH_HAS_NATIVE_STREAMS
  return guard_of(device).isStreamCapturing(current_stream(device));
#else
  (void)device;
  return false;
#endif
}

int exchange_device(c10::Device device) noexcept {
  try {
    const auto guard = guard_of(device);
    const c10::Device before = guard.getDevice();
    if (before != device) guard.uncheckedSetDevice(device);
    return before.index();
  } catch (const c10::Error&) {
    return device.index();
  }
}

at::Tensor host_buffer(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()).pinned_memory(can_pin()));
}

at::Tensor bytes_at(void* data, size_t bytes, c10::Device device) {
  return at::for_blob(data, {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

RelaxedCaptureMode::RelaxedCaptureMode(c10::Device device)
    : exchange_(exchange_mode(device.type())), mode_(kRelaxedMode) {
  if (exchange_ != nullptr) (void)exchange_(&mode_);
}
RelaxedCaptureMode::~RelaxedCaptureMode() {
  if (exchange_ != nullptr) (void)exchange_(&mode_);
}

StreamScope::StreamScope(const c10::Stream& stream) : before_(guard_of(stream.device()).exchangeStream(stream)) {}
StreamScope::~StreamScope() { guard_of(before_.device()).exchangeStream(before_); }

}  // namespace muster
