#pragma once

#include <sys/mman.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "muster/base/error.h"
#include "muster/io/fd.h"

namespace muster {

/// kResourceExhausted if shared memory of so many bytes is beyond this process's limit on file sizes. Must be called
/// before a memfd grows: beyond the limit the kernel sends the process SIGXFSZ instead of an error.
Result<> check_file_limit(size_t bytes);

/// The status of a memfd that another process sent. Empty unless it is sealed against shrinking: access beyond the end
/// of memory that shrank would raise SIGBUS.
std::optional<struct stat> status_if_sealed(const Fd& file);

struct Unmap {
  size_t bytes = 0;
  void operator()(uint8_t* base) const { munmap(base, bytes); }
};
/// Shared memory, mapped for reading and writing.
using MappedMemory = std::unique_ptr<uint8_t[], Unmap>;
/// Null, with errno, if it fails.
MappedMemory map_memory(const Fd& file, size_t bytes);

}  // namespace muster
