#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace muster {

// Streams and memory of a device, for tensors that go through memory of the host, and for those that do not. Works with
// every device of torch that has a guard (c10::impl::DeviceGuardImplInterface).

/// The stream of the device on which the calling thread works.
c10::Stream current_stream(c10::Device device);

/// Waits until the device has done what that stream was given.
void wait_for_stream(c10::Device device);

/// True while a graph captures what that stream is given.
bool is_capturing(c10::Device device);

/// Makes the device current in the calling thread, and returns the index of the one before. Makes no context on a
/// device that has none. If the device fails, nothing changes.
int exchange_device(c10::Device device) noexcept;

/// Contiguous memory of the host for the elements of `tensor`: pinned, if the device has such memory.
at::Tensor host_buffer(const at::Tensor& tensor);

/// Memory of a device as a tensor of bytes, which does not own it.
at::Tensor bytes_at(void* data, size_t bytes, c10::Device device);

/// Sets this thread's capture mode to relaxed. Otherwise, if it asks or waits for an event, it invalidates the captures
/// that other threads make in CUDA's global mode. Does nothing for devices without such modes.
class RelaxedCaptureMode {
 public:
  explicit RelaxedCaptureMode(c10::Device device);
  ~RelaxedCaptureMode();
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  int (*const exchange_)(int* mode);  ///< null: the device has no modes
  int mode_;
};

/// Makes `stream` the current one of its device for this thread.
class StreamScope {
 public:
  explicit StreamScope(const c10::Stream& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  const c10::Stream before_;
};

}  // namespace muster
