#pragma once

#include <cstdint>
#include <memory>

#include "muster/group/group.h"

namespace muster {

/// How far a rank had come in the backward that failed. Sent to the other ranks.
struct FailurePoint {
  uint64_t step = 0;           ///< backwards that ended well before
  uint64_t buckets_begun = 0;  ///< in this one, with the one that failed
  friend bool operator==(const FailurePoint&, const FailurePoint&) = default;
};

/// What a rank begins when its backward has failed, in place of the reductions that it has not begun: an exchange of
/// all ranks' FailurePoint. Where all ranks failed at the same point they are in step with each other, and may go on.
/// Where they did not, the others are in another call, and the exchange ends with a mismatch at all ranks, which ends
/// the group. Without it, a reduction of the next step could meet one of this step at another rank.
class FailureAgreement {
 public:
  /// Begins the exchange, and does not wait.
  FailureAgreement(Group& group, FailurePoint here);
  /// Waits. Throws ErrorException, always the same, unless all ranks failed at the same point; then the group is dead.
  void confirm(Group& group) const;

 private:
  struct Points;
  std::shared_ptr<Points> points_;  // shared with the operation, which may end later than this
  Work work_;
};

}  // namespace muster
