#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <shared_mutex>

#include "muster/base/at_fork.h"
#include "muster/base/error.h"
#include "muster/io/fd.h"

namespace muster {

/// Memory for tensors that other ranks of the host can map, so that a collective moves their bytes once. Its segments
/// are sealed memfds without a name. They grow on demand, and an empty segment is freed. allocate() populates the pages
/// in the calling thread, so they lie on that thread's NUMA node. It uses huge pages where the system allows them.
///
/// A shared_ptr, because tensors outlive the group that they were made for: each tensor holds the arena, and so does
/// each host communicator. After a fork the child may read inherited blocks, but allocates from segments of its own.
///
/// Thread-safe. `mutex_` guards the segments and `used_`: allocate() and free() hold it exclusively, find() and
/// mapped_bytes() shared. `blocks_` is atomic so that in_use() takes no lock in each call of a collective. It is
/// relaxed: it only tells whether a search is worthwhile, and a thread that owns a block has seen its own increment.
class Arena {
 public:
  /// `limit`: the most bytes for all blocks together. Zero means half of the machine's memory.
  static std::shared_ptr<Arena> create(size_t limit = 0);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Memory aligned to 64 bytes, not cleared; `bytes` may be zero. kResourceExhausted names the limit.
  Result<void*> allocate(size_t bytes);
  /// Frees a block of allocate(); null does nothing.
  void free(void* data);

  /// A location of memory that another process can open.
  struct Location {
    uint64_t segment = 0;  ///< the file's inode number; never zero
    uint64_t segment_bytes = 0;
    uint64_t offset = 0;
    int fd = -1;  ///< of the file in this process
  };
  /// The location of [data, data + bytes), if all of it lies in one segment of this process.
  std::optional<Location> find(const void* data, size_t bytes) const;

  /// True if there are blocks.
  bool in_use() const { return blocks_.load(std::memory_order_relaxed) > 0; }
  /// Address space of all segments.
  size_t mapped_bytes() const;

 private:
  struct Segment;
  explicit Arena(size_t limit);
  Result<Segment*> grow(size_t bytes);
  void* take(Segment& segment, size_t bytes);
  void begin_in_child();

  const size_t limit_;
  mutable std::shared_mutex mutex_;
  std::map<uintptr_t, std::unique_ptr<Segment>> segments_;  ///< by address
  size_t used_ = 0;                                         ///< bytes of all blocks
  std::atomic<size_t> blocks_ = 0;
  AtFork at_fork_;  ///< holds the lock over a fork; last, so that it is destroyed first
};

}  // namespace muster
