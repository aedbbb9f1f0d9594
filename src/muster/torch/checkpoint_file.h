#pragma once

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

namespace muster::checkpoint {

[[noreturn]] void throw_errno(int number, const std::string& what);

/// Takes bytes. Returns their number.
using ByteSink = std::function<size_t(const void*, size_t)>;
/// Writes what `body` gives the sink to path + ".partial", flushes it to the disk and renames it. Throws if that fails.
/// Then `path` is the old file, or the new one if only the flush of its directory failed.
void write_atomically(const std::string& path, const std::function<void(const ByteSink&)>& body);

/// Returns the file as uint8[N].
at::Tensor read_file(const std::string& path);

}  // namespace muster::checkpoint
