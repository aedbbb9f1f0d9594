#pragma once

#include <cstddef>

namespace muster::device_double {

/// The memory of the double. Programs get addresses that they can neither read nor write, as those of a real device:
/// only host_address() makes them usable. Thread-safe.

/// Returns nullptr if the memory is full. Never called with 0 bytes.
void* allocate(std::size_t bytes);
/// Overwrites the memory first, so that a late reader notices.
void release(void* address);
/// Where the program's own threads can reach the memory. Aborts for an address that is not the device's.
void* host_address(const void* address);
/// Of what is allocated.
std::size_t used_bytes();
/// True for an address of the device.
bool owns(const void* address);

}  // namespace muster::device_double
