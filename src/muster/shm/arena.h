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

/// Memory for tensors that ranks of one host can read and write in each other's processes, so that a collective moves
/// their bytes once. Segments are memfds: grown on demand, sealed, without a name, given back when nothing in them is
/// in use. Pages are had at allocation, by whoever allocates (so on that thread's NUMA node), and huge where the system
/// lets shared memory be.
///
/// A shared_ptr, because tensors outlive the group that they were made for: each holds the arena, and so does each
/// host communicator. Thread-safe. After a fork the child may read what it inherited, but allocates from segments of
/// its own.
class Arena {
 public:
  /// `limit`: bytes that all blocks may take together, kResourceExhausted beyond; zero: half the machine's memory.
  static std::shared_ptr<Arena> create(size_t limit = 0);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Aligned to 64 bytes, not cleared; also for no bytes. kResourceExhausted says what ran out.
  Result<void*> allocate(size_t bytes);
  /// What allocate() gave, once; null is nothing.
  void free(void* data);

  /// Where memory lies, in terms that another process understands.
  struct Location {
    uint64_t segment = 0;  ///< the file's inode number; never zero
    uint64_t segment_bytes = 0;
    uint64_t offset = 0;
    int fd = -1;  ///< of the file in this process
  };
  /// Nothing unless all of it lies in one segment.
  std::optional<Location> find(const void* data, size_t bytes) const;

  /// Whether there are blocks at all.
  bool in_use() const { return blocks_.load(std::memory_order_relaxed) > 0; }
  /// What the segments take of the address space.
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
  AtFork at_fork_;  ///< holds the lock over a fork; last, so that it goes first
};

}  // namespace muster
