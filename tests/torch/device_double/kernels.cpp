// The operators of the double. Copies and a few operators run on streams; the others run on the CPU, after a copy.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "device.h"
#include "device/memory.h"

namespace muster::device_double {
namespace {

using c10::OptionalDeviceGuard;

/// Of copies between the device and the host, which then move nothing: only their time counts.
std::atomic<int64_t> copy_rate = 0;  ///< in bytes per second; 0: as fast as memory

/// The tensor's memory as a tensor of the CPU. Only kernels may use it.
at::Tensor host_alias(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), options);
  return at::from_blob(host_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

void launch(const at::Tensor& on, std::function<void()> kernel) {
  queue_of(current_stream(on.device())).launch([kernel = std::move(kernel)] {
    const at::NoGradGuard no_grad;
    const c10::InferenceMode inference;
    kernel();
  });
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// As on real devices: a copy from or to ordinary memory of the host blocks, one between tensors of the device does
/// not.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  const at::Tensor& on = from.is_cpu() ? to : from;
  const at::Tensor source = from.is_cpu() ? from : host_alias(from);
  const at::Tensor target = to.is_cpu() ? to : host_alias(to);
  const int64_t rate = from.is_cpu() || to.is_cpu() ? copy_rate.load() : 0;
  launch(on, [source, target, rate]() mutable {
    if (rate == 0) {
      target.copy_(source);
      return;
    }
    using Clock = std::chrono::steady_clock;
    static thread_local Clock::time_point free_at;  // of the bus, for this stream
    const std::chrono::duration<double> time(static_cast<double>(source.nbytes()) / static_cast<double>(rate));
    free_at = std::max(free_at, Clock::now()) + std::chrono::duration_cast<Clock::duration>(time);
    std::this_thread::sleep_until(free_at);  // tidy: allow(sleep) a bus needs no core
  });
  const at::Tensor* const host = from.is_cpu() ? &from : to.is_cpu() ? &to : nullptr;
  const bool returns = host == nullptr || (non_blocking && is_pinned(host->storage().data()));
  if (!returns) queue_of(current_stream(on.device())).synchronize();
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  launch(self, [alias = host_alias(self), value]() mutable { alias.fill_(value); });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Scalar local_scalar(const at::Tensor& self) { return self.cpu().item(); }

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("fill_.Scalar", &fill);
  library.impl("zero_", &zero);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &at::native::resize_);
  library.impl("view", &at::native::view);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY(muster_device_double, library) {
  library.def("set_kernel_delay(int milliseconds) -> ()",
              [](int64_t milliseconds) { set_kernel_delay(std::chrono::milliseconds(milliseconds)); });
  // The addresses of two functions of C, for a library that is given memory of the device (tests/mpi/device_mpi.cpp).
  library.def("host_address_function() -> int", [] {
    void* (*const function)(void*) = [](void* address) { return owns(address) ? host_address(address) : address; };
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(function));
  });
  library.def("current_device_function() -> int", [] {
    int (*const function)() = []() -> int { return current_stream(c10::Device(kType)).device_index(); };
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(function));
  });
  library.def("used_bytes() -> int", [] { return static_cast<int64_t>(used_bytes()); });
  library.def("set_copy_rate(int bytes_per_second) -> ()", [](int64_t rate) { copy_rate = rate; });
}

}  // namespace
}  // namespace muster::device_double
