#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "muster/shm/arena.h"

namespace muster {

/// Memory for CPU tensors out of an arena, whose bytes collectives move once. Each tensor holds the arena, so it may
/// outlive the group that the arena is of; the allocator may not go before a tensor that is resized. Thread-safe.
/// Throws c10::OutOfMemoryError when the arena is used up.
std::shared_ptr<c10::Allocator> arena_allocator(std::shared_ptr<Arena> arena);

/// A tensor of `size` elements in such memory, not cleared. Its storage cannot be resized.
at::Tensor empty_in(const std::shared_ptr<Arena>& arena, int64_t size, const at::TensorOptions& options);

}  // namespace muster
