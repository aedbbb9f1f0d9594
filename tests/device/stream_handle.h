#pragma once

namespace muster::device_double {

/// What a stream is for libraries that are loaded at run time, as cudaStream_t is for NCCL.
struct StreamHandle {
  /// Runs task(argument) in the order of the stream: once, or if a graph captures it, at each replay. Then
  /// release(argument).
  void (*enqueue)(StreamHandle* stream, void (*task)(void* argument), void* argument, void (*release)(void* argument));
  /// Where a kernel finds memory of the device. Other addresses are returned as they are.
  void* (*kernel_address)(void* address);
};

}  // namespace muster::device_double
