#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "muster/group/group.h"

namespace muster::nccl {

/// What a rank of a group over NCCL learns of the other ranks, over the links of the host's group: that one was lost,
/// and why an operation does not end. News travels in a tree of the ranks, so a rank has few links. Thread-safe, but
/// for lost_for() and explain_timeout(): one thread at a time may call these.
class PeerMonitor {
 public:
  /// `group_id` is that of the flight recorders of the group over NCCL. connect() must come next.
  PeerMonitor(std::shared_ptr<Group> host, uint64_t group_id) : host_(std::move(host)), group_id_(group_id) {}

  /// Makes the links of the tree. Collective over the host's group, within its timeout.
  Result<> connect();
  /// How a rank left or died, or why it has aborted the host's group.
  std::optional<Error> lost() const;
  /// The same, once it has been so for a while: a rank that has left may have done its part of operations before.
  std::optional<Error> lost_for(Duration time);
  /// True if a rank waits for explain_timeout() of all ranks, also of those that have no operation in flight.
  bool asked() const;
  /// Why an operation has not ended by its deadline: which rank is in which call, from the flight recorders of all
  /// ranks. kTimeout, or kMismatch if the ranks are in different calls. The error names the rank that is late. Takes
  /// some seconds if a rank does not answer.
  Error explain_timeout();

 private:
  void ask();

  const std::shared_ptr<Group> host_;
  const uint64_t group_id_;
  uint8_t sent_ = 0, received_ = 0;  ///< what messages of the tree carry
  std::vector<Rank> peers_;          ///< of this rank in the tree
  // Constant after connect().
  std::vector<Work> questions_;  ///< a message from each of them, once it asks
  std::vector<Work> losses_;     ///< a message from each of them that never comes: it fails when that rank is lost
  std::optional<TimePoint> lost_since_;  ///< only for lost_for()
};

}  // namespace muster::nccl
