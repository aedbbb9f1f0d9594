#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "device/stream.h"

namespace muster::device_double {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;

c10::Stream current_stream(c10::Device device);
inline Stream& queue_of(const c10::Stream& which) { return stream(which.device_index(), which.id()); }

/// Gives memory back in the order of the stream in which it was allocated, as allocators of real devices do: what other
/// streams do with it meanwhile is lost, unless they were recorded.
c10::Allocator* device_allocator();
void record_on_stream(const c10::DataPtr& memory, const c10::Stream& used_on);

/// Memory of the host that copies need not wait for.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace muster::device_double
