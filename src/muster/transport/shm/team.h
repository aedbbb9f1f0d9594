#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/error.h"
#include "muster/io/fd.h"

namespace muster {

/// What ranks of one host share to do collectives: per rank a control line and two slots in one memfd.
///
/// Work goes in steps, numbered alike on every rank. In a step a rank may write its slot, publishes the step, waits for
/// the ranks whose slots it wants, and reads them; a slot may be read only within its step. Two slots alternate, so
/// one wait a step is enough: who has published step k has finished reading step k - 1. Single writer per line, no
/// locks. Waits spin, then park on a futex.
///
///   team.begin(deadline);                             // next step; the own slot becomes writable
///   memcpy(team.slot(), data, n);  team.publish(tag);
///   team.wait_all(deadline);  read(team.slot(peer));
///
/// One thread at a time. Errors are final: after one, the team is only good for abort().
class Team {
 public:
  /// What a rank says about the operation that a step belongs to; others compare it with theirs (a mismatch check at no
  /// extra cost: it travels with the step).
  using Tag = std::array<uint64_t, 4>;
  /// Asked now and then while a wait for `awaited` is not over: drives the links, and returns the error that ends the
  /// wait, if any. What the awaited rank published before it went still counts.
  using Watch = std::function<Result<>(Rank awaited)>;

  /// Made by one rank, attached by all. Sealed against resizing; never has a name, so it can't be left behind.
  static Result<Fd> allocate(int size, size_t slot_bytes);
  /// Checks that the memory has the right form for `size` and belongs to this protocol.
  static Result<std::unique_ptr<Team>> attach(const Fd& memory, Rank rank, int size, Watch watch);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  Rank rank() const { return rank_; }
  int size() const { return size_; }
  size_t slot_bytes() const { return slot_bytes_; }

  /// Starts the next step and waits until the own slot of this step may be written.
  Result<> begin(const Deadline& deadline);
  /// Makes the own slot and tag visible to the others.
  void publish(const Tag& tag);
  /// Waits until the rank has published this step. kTimeout names the ranks that have not.
  Result<> wait(Rank peer, const Deadline& deadline);
  Result<> wait_all(const Deadline& deadline);

  uint8_t* slot() { return slot(rank_); }
  uint8_t* slot(Rank peer);
  /// The peer's tag of this step; valid after wait(peer).
  const Tag& tag(Rank peer) const;

  /// Ends every wait at every rank that maps this memory. The watch gives the reason; this only wakes them.
  void wake_all();

 private:
  struct Line;
  struct Header;
  struct Slot;
  Team(void* memory, size_t bytes, Rank rank, int size, size_t slot_bytes, Watch watch);
  Line& line(Rank peer) const;
  Slot& slot_of(Rank peer) const;
  bool reached(Rank peer, uint32_t step);
  Result<> wait_for(Rank peer, uint32_t step, const Deadline& deadline);
  Result<> park(Rank peer, uint32_t step, const Deadline& deadline);
  tl::unexpected<Error> late(Rank awaited, uint32_t step) const;

  void* memory_;
  size_t bytes_;
  Rank rank_;
  int size_;
  size_t slot_bytes_;
  Watch watch_;
  uint32_t step_ = 0;
  const int most_spins_;
  int spins_;                   ///< before the next park
  std::vector<uint32_t> seen_;  ///< the last step each rank was seen to have published: spares reading its line
};

}  // namespace muster
