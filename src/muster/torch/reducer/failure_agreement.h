#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "muster/group/group.h"

namespace muster {

/// The progress of a rank in the backward that failed. Sent to the other ranks.
struct FailurePoint {
  uint64_t step = 0;           ///< backwards that succeeded before
  uint64_t buckets_begun = 0;  ///< submitted in the failed backward, including the bucket that failed
  friend bool operator==(const FailurePoint&, const FailurePoint&) = default;
};

/// A rank whose backward fails exchanges FailurePoints with all ranks, instead of the reductions that it has not
/// submitted. If all ranks failed at the same point, they are in step and may continue. Otherwise the other ranks are
/// in another call, so the exchange ends with a mismatch at all ranks, which ends the group. Without the exchange, a
/// reduction of the next step could match one of this step at another rank.
class FailureAgreement {
 public:
  /// Begins the exchange without waiting.
  FailureAgreement(Group& group, FailurePoint here);
  /// Waits for the exchange. If not all ranks failed at the same point, throws the same ErrorException each time; the
  /// group is then dead.
  void confirm(Group& group) const;

 private:
  std::shared_ptr<std::vector<FailurePoint>> points_;  ///< by rank; shared with the operation, which may end later
  std::optional<Work> work_;
};

}  // namespace muster
