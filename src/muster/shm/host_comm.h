#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/wait_policy.h"
#include "muster/shm/arena.h"
#include "muster/shm/host_comm_memory.h"
#include "muster/shm/peer_memory.h"
#include "muster/shm/rank_cores.h"

namespace muster {

/// Host communicator: the shared memory in which the ranks of one host run collectives. Each rank has four slots, and
/// one record for each of the last steps. All of it is in one memfd (host_comm_memory.h: layout and memory order).
///
/// Work is divided into steps, which have the same numbers on every rank. In a step, a rank may write its slot,
/// publishes the step, waits for the ranks whose slots it needs, and reads those slots. A rank that has published step
/// k + 2 has finished reading step k, and there are four slots. So a rank may publish the next step before it reads
/// this one, which hides its waits. There are more records than slots: a rank that only sends small messages, which fit
/// into the records, runs far ahead and rarely has to check its readers. Waits spin, then yield, then park
/// (base/wait_policy.h).
///
///   comm.open(tag);                                   // once a call
///   comm.next();  MUSTER_TRY(comm.reserve(deadline)); // the own slot and payload may be written
///   memcpy(comm.slot(), data, n);  comm.publish();
///   MUSTER_TRY(comm.wait_all(comm.step(), deadline));
///   read(comm.slot(peer, comm.step()));               // until the step after the next is published
///
/// Not thread-safe. Errors are final: after an error, only wake_all() and mark_failed() may be called.
///
/// It has many fields, because most of them save a read of shared memory in the path of a small call: what the other
/// ranks have published as far as this rank knows, and what this rank has published itself.
class HostComm {
 public:
  /// Describes the call that a step belongs to. A wait compares a fingerprint of it and of all tags before it with this
  /// rank's own fingerprint, so a check for mismatches costs nothing extra.
  using Tag = std::array<uint64_t, 4>;
  /// Called from time to time while this rank waits for `awaited`. It drives the links and returns the error that ends
  /// the wait, if any. A step that the awaited rank published before it left still ends the wait with success.
  using Progress = std::function<Result<>(Rank awaited)>;

  /// One rank allocates, then all ranks attach. No rank may begin a call before all have attached, if there are more
  /// than kMaxFlatRanks. Slots of many ranks are smaller than `slot_bytes` (host_comm_shape()).
  static Result<Fd> allocate(int size, size_t slot_bytes = size_t{512} << 10);
  /// Checks that the memory has the right form for `size` ranks. kResourceExhausted if there is no memory for the own
  /// slots.
  static Result<std::unique_ptr<HostComm>> attach(const Fd& memory, Rank rank, int size, Progress progress);
  HostComm(const HostComm&) = delete;
  HostComm& operator=(const HostComm&) = delete;

  /// Lets collectives work directly on tensors in this arena, if all ranks have one. A shared_ptr, because the tensors
  /// own the arena too. Must be called before the first step.
  void use(std::shared_ptr<Arena> arena) { arena_ = std::move(arena); }
  const Arena* arena() const { return arena_.get(); }

  Rank rank() const { return rank_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return memory_->slot_bytes(); }
  /// True if every rank waits for rank 0 alone, and rank 0 for all. This is the case with many more ranks than cores:
  /// there, n waits at each of n ranks would mostly cost context switches. The last rank that attaches decides it for
  /// all, by the cores that all ranks together may use.
  bool has_leader() const { return memory_->has_leader(); }

  /// See RankCores.
  bool has_own_cores() const { return rank_cores_.has_own_cores(); }

  /// Begins a call: the steps from now on belong to it.
  void open(const Tag& tag);
  /// Advances to the next step. Does not wait.
  uint32_t next() { return ++step_; }
  uint32_t step() const { return step_; }
  /// Waits until the own slot and payload of this step may be written, and the step published.
  Result<> reserve(const Deadline& deadline) {
    // The slot holds the data of step_ - kHostCommSlots. A rank that has published two steps more has read it.
    const uint32_t needed = step_ - kHostCommSlots + 2;
    return at_least(all_published_step_, needed) ? Result<>{} : wait_for_others(needed, deadline, false);
  }
  /// The same for a step that does not write the slot.
  Result<> reserve_payload(const Deadline& deadline) {
    if (at_least(all_published_step_, step_ - kStepRecords + 2)) return {};
    // Waits for more than is needed, because reading the other ranks' records is expensive.
    return wait_for_others(step_ - kStepRecords / 2, deadline, false);
  }
  /// Makes the slot and payload of this step visible to the other ranks.
  void publish();
  /// For a rank that publishes step after step without waiting: prefetches the record of the step after the next one.
  /// Between distant cores, fetching these cache lines takes half of the time of such a step.
  void fetch_ahead();

  /// Waits until the rank has published the step. kTimeout names the ranks that have not. kMismatch names the rank if
  /// its tag, or one before it, differs from this rank's; see foreign_tag().
  Result<> wait(Rank peer, uint32_t step, const Deadline& deadline);
  /// The same for all ranks, one after the other.
  Result<> wait_each(uint32_t step, const Deadline& deadline) { return wait_for_others(step, deadline, true); }
  /// The same for a step in which every rank waits for all. With a leader, rank 0 compares for all.
  Result<> wait_all(uint32_t step, const Deadline& deadline);
  /// The other rank's tag, after a wait that returned kMismatch.
  const std::optional<Tag>& foreign_tag() const { return foreign_tag_; }

  /// This rank's memory of the current step, and a peer's memory of a step that this rank has waited for.
  uint8_t* slot() { return memory_->slot(rank_, step_); }
  uint8_t* slot(Rank peer, uint32_t step) { return memory_->slot(peer, step); }
  uint8_t* payload() { return record(rank_, step_).payload; }
  const uint8_t* payload(Rank peer, uint32_t step) { return record(peer, step).payload; }

  /// True if at the last wait_all() every rank had tensors in an arena that all ranks can map. Equal at all ranks.
  bool all_direct() const { return all_direct_; }
  /// Makes all_direct() false permanently. All ranks must call it in the same call.
  void disable_direct() {
    direct_ = all_direct_ = false;
    own_direct_ = 0;
  }
  PeerMemory& peer_memory() { return peer_memory_; }
  pid_t pid(Rank peer) const { return memory_->rank(peer).pid; }

  /// Space for one pointer per rank, so that a call does not allocate.
  std::vector<const void*>& pointers() { return pointers_; }

  /// Wakes every parked rank that maps this memory. Its Progress callback then finds the reason.
  void wake_all();
  /// Publishes that this rank has failed and which rank of the group it blames (kNoRank: none), and wakes all.
  void mark_failed(Rank blamed);
  /// Another rank that has failed; kNoRank if there is none.
  Rank failed_peer() const;
  /// The rank of the group that `peer` blames; kNoRank if there is none.
  Rank rank_blamed_by(Rank peer) const;
  /// An error if another rank has failed: that rank may have reused the tensors that were read before this call.
  Result<> check();

 private:
  friend struct HostCommSkip;  // a test uses it to skip millions of steps

  /// Steps wrap around. refresh() ensures that no two compared steps are 2^31 apart.
  static bool at_least(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

  HostComm(std::shared_ptr<HostCommMemory> memory, Rank rank, int size, Progress progress);
  StepRecord& record(Rank peer, uint32_t step) const { return memory_->rank(peer).records[step % kStepRecords]; }
  void refresh();
  bool has_published(Rank peer, uint32_t step);
  Result<> wait_on_record(Rank peer, uint32_t step, const Deadline& deadline);
  Result<> wait_for_leader(uint32_t step, const Deadline& deadline);
  uint32_t direct_word() const;
  void update_all_direct(uint32_t step);
  Result<> wait_for_others(uint32_t step, const Deadline& deadline, bool compare);
  tl::unexpected<Error> mismatch_error(Rank peer, uint32_t step);
  Result<> wait_on(std::atomic<uint32_t>& word, Rank owner, uint32_t step, const Deadline& deadline);
  Result<> park(std::atomic<uint32_t>& word, Rank owner, uint32_t step, const Deadline& deadline);
  void publish_word(std::atomic<uint32_t>& word, uint32_t step);
  tl::unexpected<Error> timeout_error(Rank awaited, uint32_t step) const;

  std::shared_ptr<HostCommMemory> memory_;
  Rank rank_;
  int size_;
  Progress progress_;
  Tag tag_{};
  std::optional<Tag> foreign_tag_;
  uint64_t fingerprint_ = 0;  ///< of all tags so far
  uint32_t step_ = 0;
  uint32_t all_published_step_ = 0;  ///< a step that all ranks have published, as far as this rank knows
  uint32_t refreshed_step_ = 0;      ///< of the last refresh()
  const Duration park_slice_;
  RankCores rank_cores_;
  AdaptiveWait adaptive_wait_;
  std::vector<uint32_t> seen_steps_;  ///< by rank: the last step that this rank saw published. Saves cache misses
  std::vector<const void*> pointers_;
  std::shared_ptr<Arena> arena_;
  PeerMemory peer_memory_;
  const uint64_t pid_namespace_;
  uint32_t own_direct_ = 0;  ///< StepRecord::direct of this call's steps
  bool direct_ = true;
  bool all_direct_ = false;
};

}  // namespace muster
