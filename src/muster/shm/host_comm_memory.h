#pragma once

#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "muster/base/error.h"
#include "muster/io/fd.h"

namespace muster {

/// The memory of a host communicator as all its ranks see it. Each rank writes its own parts only, but for `waiters`.
///
///   header | per rank: HostCommRank | per rank: kHostCommSlots slots of slot_bytes
///
/// Parts start on cache lines, slots on pages. Ranks that are threads of one process share one mapping.
inline constexpr uint32_t kHostCommSlots = 4;
/// Words of steps that a rank has; a multiple of kHostCommSlots.
inline constexpr uint32_t kStepRecords = 32;
/// What a step carries in the very line that announces it.
inline constexpr size_t kStepPayload = 40;

/// So many ranks meet flat even where they share cores.
inline constexpr int kMaxFlatRanks = 16;

/// What follows from the number of a host communicator's ranks, and of the cores that they may use.
struct HostCommShape {
  size_t slot_bytes;
  bool hub;  ///< see HostComm::has_leader()
};
/// Slots of `wish` bytes, or smaller ones where there are many: all slots of a host communicator together have a limit.
HostCommShape host_comm_shape(int size, int cores, size_t wish = size_t{512} << 10);

/// A rank's word of one step. Readers touch the first cache line only; the second tells what a mismatch was about.
struct alignas(128) StepRecord {
  std::atomic<uint32_t> step;  ///< the last step that was published here
  uint32_t floor;              ///< a step that the writer knows all ranks to have published
  uint64_t fingerprint;        ///< of the tag
  uint32_t direct;             ///< zero, or who could map the writer's tensors: the ranks of its pid namespace
  alignas(8) uint8_t payload[kStepPayload];
  alignas(64) std::atomic<uint64_t> tag[4];
};
static_assert(sizeof(StepRecord) == 128 && std::atomic<uint64_t>::is_always_lock_free);

inline constexpr uint32_t kBlamesNobody = ~uint32_t{0};

struct HostCommRank {
  alignas(128) std::atomic<uint32_t> waiters;  ///< ranks parked on one of this rank's words
  alignas(128) std::atomic<uint32_t> met;      ///< rank 0: the last step that it saw all ranks publish
  alignas(128) pid_t pid;                      ///< in its namespace
  std::atomic<uint32_t> core;                  ///< where it ran when it published last
  /// Those that it may run on, a bit each; all zero: not known yet.
  std::atomic<uint64_t> usable_cores[sizeof(cpu_set_t) / sizeof(uint64_t)];
  /// Not zero once it has failed: one more than the rank of the group that it blames, or kBlamesNobody.
  std::atomic<uint32_t> gave_up;
  StepRecord lines[kStepRecords];  ///< of step % kStepRecords
};

class HostCommMemory {
 public:
  /// Made by one rank, mapped by all. Sealed against resizing; never has a name, so it can't be left behind.
  static Result<Fd> allocate(int size, size_t slot_bytes, bool hub);
  /// Checks that the memory has the right form for `size` and belongs to this protocol. Shared among the ranks of this
  /// process (hence the shared_ptr): 512 threads with a mapping each would spend more on page tables than on data.
  static Result<std::shared_ptr<HostCommMemory>> map(const Fd& memory, int size);
  ~HostCommMemory();
  HostCommMemory(const HostCommMemory&) = delete;
  HostCommMemory& operator=(const HostCommMemory&) = delete;

  /// Gets the pages of a rank's slots, now and on its own NUMA node: a page that can't be had later is a signal.
  Result<> populate(const Fd& memory, Rank rank) const;

  size_t slot_bytes() const { return slot_bytes_; }
  bool hub() const { return hub_; }
  HostCommRank& rank(Rank rank) const { return ranks_[rank]; }
  uint8_t* slot(Rank rank, uint32_t step) const { return slots_ + slot_index(rank, step) * slot_bytes_; }

 private:
  HostCommMemory(void* base, size_t bytes, int size, size_t slot_bytes, bool hub);
  static size_t slot_index(Rank rank, uint32_t step) {
    return static_cast<size_t>(rank) * kHostCommSlots + step % kHostCommSlots;
  }

  void* base_;
  size_t bytes_;
  size_t slot_bytes_;
  bool hub_;
  HostCommRank* ranks_;
  uint8_t* slots_;
};

}  // namespace muster
