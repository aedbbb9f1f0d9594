#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "muster/shm/arena.h"

namespace muster {

/// Allocates CPU tensors in an arena. Collectives move the bytes of arena memory only once. Each tensor holds the
/// arena, so it may outlive the arena's group. The allocator must outlive tensors that are resized. Thread-safe. Throws
/// c10::OutOfMemoryError when the arena is full.
std::shared_ptr<c10::Allocator> arena_allocator(std::shared_ptr<Arena> arena);

/// An uninitialized tensor of `size` elements in the arena. Its storage cannot be resized.
at::Tensor empty_in(const std::shared_ptr<Arena>& arena, int64_t size, const at::TensorOptions& options);

}  // namespace muster
