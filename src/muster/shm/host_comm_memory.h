#pragma once

#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "muster/base/error.h"
#include "muster/shm/memory_file.h"

namespace muster {

// The memory of a host communicator as all its ranks see it:
//
//   header | HostCommState | per rank: HostCommRank | per rank: kHostCommSlots slots of slot_bytes
//
// Parts start on cache lines, slots on pages. A rank writes only its own parts, except `waiters` and HostCommState.
// There are no locks.
//
// Invariants. Each rank publishes the steps 1, 2, 3, ... in order. The record and the slot of step k hold the data of
// step k from its publication until the owner publishes a step that uses the same record or slot again. The owner
// overwrites a slot only when every rank has published a step that is at least two later than the slot's old step
// (HostComm::reserve()), and a rank publishes step k + 2 only after it has finished reading step k. So no rank reads a
// slot while its owner overwrites it.
//
// Memory order, field by field:
// - StepRecord::step: the owner stores it with release after it has written the slot and the other fields of the
//   record. A reader loads it with acquire and reads the rest only if it is at least the step that it waits for. So
//   the plain fields and the slot need no order of their own.
// - StepRecord::tag: relaxed atomics. It is read after `step` like the plain fields, but only for an error message, and
//   then the owner may be writing the tag of a later step. So a word may be newer, but must not be torn.
// - HostCommRank::all_published_step: rank 0 stores it with release after it has loaded the `step` of every rank with
//   acquire. A rank that loads it with acquire therefore sees all that the other ranks wrote before that step.
// - HostCommRank::waiters: see HostComm::publish_word().
// - core, usable_cores: relaxed. They are hints; a stale value costs time only.
// - HostCommState::joined: each rank adds one with acq_rel after it has stored its usable_cores. So the last rank sees
//   the cores of all ranks. No rank changes them before its first call.
// - HostCommState::has_leader: relaxed. The last rank that joins stores it. All ranks join before the first call of any
//   rank, and learn this over other channels, which order the store.
// - pid: written once before the rank publishes its first step, so `step` orders it.
// - failure: the rank stores it with release when it fails, and readers load it with acquire. HostComm::check() has an
//   acquire fence before its load: data that was read before the fence is valid if `failure` is still zero, because a
//   rank reuses its tensors only after it has stored `failure` and then closed its links, which takes system calls.
inline constexpr uint32_t kHostCommSlots = 4;
/// Step records of each rank; a multiple of kHostCommSlots.
inline constexpr uint32_t kStepRecords = 32;
/// Bytes of payload in the cache line that announces a step.
inline constexpr size_t kStepPayload = 40;

/// Up to this many ranks wait for each other without a leader, also where they share cores.
inline constexpr int kMaxFlatRanks = 16;

/// The properties that depend on the number of ranks and on the number of cores that they may use.
struct HostCommShape {
  size_t slot_bytes;
  bool has_leader;  ///< see HostComm::has_leader()
};
/// Slots of `preferred` bytes, or smaller ones for many ranks: all slots of a host communicator together have a limit.
/// The slots do not depend on the cores.
HostCommShape host_comm_shape(int size, int cores, size_t preferred = size_t{512} << 10);

/// One step of one rank. Readers touch the first cache line only; the second is for the message of a mismatch.
struct alignas(128) StepRecord {
  std::atomic<uint32_t> step;   ///< the last step that was published here
  uint32_t all_published_step;  ///< a step that all ranks have published, as far as the writer knows
  uint64_t fingerprint;         ///< of this tag and all before it
  uint32_t direct;              ///< the PID namespace whose ranks can map the writer's tensors; zero: none
  alignas(8) uint8_t payload[kStepPayload];
  alignas(64) std::atomic<uint64_t> tag[4];
};
static_assert(sizeof(StepRecord) == 128 && std::atomic<uint64_t>::is_always_lock_free);

/// `HostCommRank::failure` of a rank that has failed and blames no rank.
inline constexpr uint32_t kBlamesNoRank = ~uint32_t{0};

/// What the ranks decide together.
struct HostCommState {
  std::atomic<uint32_t> joined;      ///< ranks that have called HostCommMemory::join()
  std::atomic<uint32_t> has_leader;  ///< see HostComm::has_leader()
};

/// Words of a set of cores, one bit for each core.
inline constexpr size_t kCoreWords = sizeof(cpu_set_t) / sizeof(uint64_t);

struct HostCommRank {
  alignas(128) std::atomic<uint32_t> waiters;             ///< ranks parked on one of this rank's words
  alignas(128) std::atomic<uint32_t> all_published_step;  ///< rank 0: the last step that it saw all ranks publish
  alignas(128) pid_t pid;                                 ///< in its PID namespace
  std::atomic<uint32_t> core;                             ///< on which it ran when it published last
  /// The cores that it may use, one bit each; all zero if they are not known yet.
  std::atomic<uint64_t> usable_cores[kCoreWords];
  /// Zero until it fails; then kBlamesNoRank, or one more than the rank of the group that it blames.
  std::atomic<uint32_t> failure;
  StepRecord records[kStepRecords];  ///< of step % kStepRecords
};

class HostCommMemory {
 public:
  /// One rank allocates it, all ranks map it. It is sealed against resizing. It has no name, so it cannot be left over.
  static Result<Fd> allocate(int size, size_t slot_bytes);
  /// Checks that the memory has the right form for `size` ranks. A shared_ptr, because the ranks of one process share a
  /// mapping: 512 threads with a mapping each would spend more on page tables than on data.
  static Result<std::shared_ptr<HostCommMemory>> map(const Fd& memory, int size);

  /// Allocates the pages of a rank's slots now, on its own NUMA node. Later, a lack of memory would raise SIGBUS.
  Result<> populate(const Fd& memory, Rank rank) const;

  /// Must be called once by each rank, after it has stored its usable_cores. The last call decides has_leader() for all
  /// ranks. One rank alone cannot decide, because it may be bound to a core of its own.
  void join();
  /// The number of cores that all ranks together may use. Zero if a rank has not stored its own yet.
  int count_cores() const;

  size_t slot_bytes() const { return slot_bytes_; }
  bool has_leader() const { return state_->has_leader.load(std::memory_order_relaxed) != 0; }
  void set_leader(bool has_leader) { state_->has_leader.store(has_leader ? 1 : 0, std::memory_order_relaxed); }
  HostCommRank& rank(Rank rank) const { return ranks_[rank]; }
  uint8_t* slot(Rank rank, uint32_t step) const { return slots_ + slot_index(rank, step) * slot_bytes_; }

 private:
  HostCommMemory(MappedMemory memory, int size, size_t slot_bytes);
  static size_t slot_index(Rank rank, uint32_t step) {
    return static_cast<size_t>(rank) * kHostCommSlots + step % kHostCommSlots;
  }

  MappedMemory memory_;
  int size_;
  size_t slot_bytes_;
  HostCommState* state_;
  HostCommRank* ranks_;
  uint8_t* slots_;
};

}  // namespace muster
