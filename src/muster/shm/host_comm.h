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
#include "muster/shm/cpu_migrator.h"
#include "muster/shm/host_comm_memory.h"
#include "muster/shm/peer_memory.h"

namespace muster {

/// Host communicator: the shared memory in which the ranks of one host run collectives. Each rank has one record for
/// each of the last steps, and four slots. All of it is in one memfd.
///
/// Work goes in steps with the same numbers on every rank. In a step, a rank may write its slot, publishes the step,
/// waits for the ranks whose slots it needs, and reads those. A rank that has published step k + 2 has finished reading
/// what belongs to step k, and there are four slots. So a rank may publish the next step before it reads this one,
/// which hides its waits. There are more step records than slots: a rank that only sends small messages, which travel
/// in the records, runs far ahead and rarely has to check its readers. Each record has a single writer; there are no
/// locks. Waits spin, then yield, then park on a futex (base/wait_policy.h).
///
///   comm.open(tag);                                   // once a call
///   comm.next();  MUSTER_TRY(comm.reserve(deadline)); // the own slot and payload may be written
///   memcpy(comm.slot(), data, n);  comm.publish();
///   MUSTER_TRY(comm.wait_all(comm.step(), deadline));
///   read(comm.slot(peer, comm.step()));               // until the step after the next is published
///
/// For one thread at a time. Errors are final: after one, only wake_all() may be called.
class HostComm {
 public:
  /// Describes the call that a step belongs to. A wait compares it, and a fingerprint of all tags before it, with this
  /// rank's own: a mismatch check at no extra cost.
  using Tag = std::array<uint64_t, 4>;
  /// Asked now and then while a wait for `awaited` is not over: drives the links, and returns the error that ends the
  /// wait, if any. What the awaited rank published before it went still counts.
  using Watch = std::function<Result<>(Rank awaited)>;

  /// Made by one rank, attached by all. Slots of many ranks are smaller than `slot_bytes`: all slots of a host
  /// communicator together have a limit.
  static Result<Fd> allocate(int size, size_t slot_bytes = size_t{512} << 10);
  /// Checks that the memory has the right form for `size` and belongs to this protocol. kResourceExhausted where the
  /// machine has no memory for the own slots.
  static Result<std::unique_ptr<HostComm>> attach(const Fd& memory, Rank rank, int size, Watch watch);
  HostComm(const HostComm&) = delete;
  HostComm& operator=(const HostComm&) = delete;

  /// Lets collectives work on tensors of this arena where they lie, if all ranks have one. Shared with the tensors. To
  /// be called before the first step.
  void use(std::shared_ptr<Arena> arena) { arena_ = std::move(arena); }
  const Arena* arena() const { return arena_.get(); }

  Rank rank() const { return rank_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return memory_->slot_bytes(); }
  /// Whether the ranks meet by way of rank 0: they are too many for the cores, and n waits at each of n ranks would
  /// mostly be switches from one to the other.
  bool has_leader() const { return memory_->hub(); }

  /// Whether there is a core for each rank, as far as this rank knows: of the cores that all of them may use, for each
  /// may be bound to a few. Looked at anew from time to time where waits are long.
  bool has_own_cores() const { return own_cores_; }

  /// Begins a call: what is published from now on belongs to it.
  void open(const Tag& tag);
  /// Goes on to the next step. Waits for nobody, touches nothing.
  uint32_t next() { return ++step_; }
  uint32_t step() const { return step_; }
  /// Waits until the own slot and payload of this step may be written, and the step published.
  Result<> reserve(const Deadline& deadline) {
    // What is overwritten was last read in step_ - kHostCommSlots.
    const uint32_t needed = step_ - kHostCommSlots + 2;
    return at_least(all_published_step_, needed) ? Result<>{} : settle(needed, deadline, false);
  }
  /// The same where the slot is left alone.
  Result<> reserve_payload(const Deadline& deadline) {
    if (at_least(all_published_step_, step_ - kStepRecords + 2)) return {};
    return settle(step_ - kStepRecords / 2, deadline, false);  // more than is needed: a look at the others is dear
  }
  /// Makes them visible to the others.
  void publish();
  /// For who publishes step after step and waits for nobody: has the lines of the step after the next brought here
  /// meanwhile. On cores far from each other that is half of what such a step takes.
  void fetch_ahead();

  /// Waits until the rank has published the step. kTimeout names the ranks that have not; kMismatch, with the rank,
  /// says that its tag is another, or one before was: foreign_tag().
  Result<> wait(Rank peer, uint32_t step, const Deadline& deadline);
  /// The same for all ranks, one after the other.
  Result<> wait_each(uint32_t step, const Deadline& deadline) { return settle(step, deadline, true); }
  /// The same for a step in which every rank waits for all; where there is a hub, rank 0 compares for all.
  Result<> wait_all(uint32_t step, const Deadline& deadline);
  /// The tag of the rank that a wait refused, if one did.
  const std::optional<Tag>& foreign_tag() const { return foreign_tag_; }

  /// Memory of the current step, and a peer's of a step that was waited for.
  uint8_t* slot() { return memory_->slot(rank_, step_); }
  uint8_t* slot(Rank peer, uint32_t step) { return memory_->slot(peer, step); }
  uint8_t* payload() { return line(rank_, step_).payload; }
  const uint8_t* payload(Rank peer, uint32_t step) { return line(peer, step).payload; }

  /// Whether at the last wait_all() every rank had tensors in an arena that all could map: all ranks know the same.
  bool all_direct() const { return all_direct_; }
  /// Ends that for good. All ranks must do it in the same call.
  void give_up_direct() {
    direct_ = all_direct_ = false;
    own_direct_ = 0;
  }
  PeerMemory& peer_memory() { return peer_memory_; }
  pid_t pid(Rank peer) const { return memory_->rank(peer).pid; }

  /// Room for a pointer a rank, so that a call allocates nothing.
  std::vector<const void*>& pointers() { return pointers_; }

  /// Ends every wait at every rank that maps this memory. The watch gives the reason; this only wakes them.
  void wake_all();
  /// The same, and says that this rank takes no part any more, and whom it blames, in the numbers of the host
  /// communicator's user.
  void give_up(Rank blamed);
  /// Another rank that has given up; kNoRank: none.
  Rank quitter() const;
  /// What it gave up with.
  Rank blamed_by(Rank quitter) const;
  /// An error once one has. What was read before may no longer be what its owner meant to be read.
  Result<> check();

 private:
  friend struct HostCommSkip;  // of the tests: lets millions of steps pass

  /// Steps wrap around; of two that are compared, none is 2^31 ahead of the other: refresh() sees to that.
  static bool at_least(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

  HostComm(std::shared_ptr<HostCommMemory> memory, Rank rank, int size, Watch watch);
  StepRecord& line(Rank peer, uint32_t step) const { return memory_->rank(peer).lines[step % kStepRecords]; }
  void refresh();
  bool has_come(Rank peer, uint32_t step);
  Result<> await(Rank peer, uint32_t step, const Deadline& deadline);
  Result<> await_leader(uint32_t step, const Deadline& deadline);
  uint32_t direct_word() const;
  void update_all_direct(uint32_t step);
  Result<> settle(uint32_t step, const Deadline& deadline, bool compare);
  tl::unexpected<Error> differs(Rank peer, uint32_t step);
  Result<> wait_on(std::atomic<uint32_t>& word, Rank owner, uint32_t step, const Deadline& deadline);
  void publish_cpu();
  void publish_core_set();
  void learn_core_sets();
  void migrate_away_from(Rank awaited);
  Result<> park(std::atomic<uint32_t>& word, Rank owner, uint32_t step, const Deadline& deadline);
  void announce(std::atomic<uint32_t>& word, uint32_t step);
  tl::unexpected<Error> late(Rank awaited, uint32_t step) const;

  std::shared_ptr<HostCommMemory> memory_;
  Rank rank_;
  int size_;
  Watch watch_;
  Tag tag_{};
  std::optional<Tag> foreign_tag_;
  uint64_t fingerprint_ = 0;  ///< of all tags so far
  uint32_t step_ = 0;
  uint32_t all_published_step_ = 0;  ///< a step that all ranks are known to have published
  uint32_t refreshed_ = 0;           ///< the step in which refresh() was called last
  const Duration watch_slice_;
  bool own_cores_;      ///< there is one for each rank
  cpu_set_t core_set_;  ///< what the others know of this rank
  CpuMigrator cpu_migrator_;
  uint32_t core_ = ~0U;
  AdaptiveWait adaptive_wait_;
  uint32_t idle_spins_ = 0;
  std::vector<uint32_t> seen_;  ///< the last step each rank was seen to have published: spares reading its line
  std::vector<const void*> pointers_;
  std::vector<uint32_t> cores_;  ///< of all ranks: room to look at them
  std::shared_ptr<Arena> arena_;
  PeerMemory peer_memory_;
  const uint64_t pid_namespace_;
  uint32_t own_direct_ = 0;  ///< what every step of this call says: lines that others read are better not read here
  bool direct_ = true;
  bool all_direct_ = false;
};

}  // namespace muster
