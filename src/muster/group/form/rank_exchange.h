#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/error.h"
#include "muster/collective/group_spec.h"
#include "muster/collective/rank_info.h"

namespace muster {

/// How the ranks of a group that forms tell each other their addresses. Each rank calls announce() and then members().
class RankExchange {
 public:
  virtual ~RankExchange() = default;
  /// The spec, with the name under which the group forms now.
  virtual const GroupSpec& spec() const = 0;

  /// Publishes this rank's record. Returns false if this group is over; the caller must then call next_group().
  /// kAlreadyExists if another process has announced the same rank; the error names that process.
  virtual Result<bool> announce(const RankInfo& self, const Deadline& deadline) = 0;
  /// Waits for rank 0's record.
  virtual Result<RankInfo> first_rank(const Deadline& deadline) = 0;
  /// Waits for the records of all ranks, in the order of ranks. Returns nullopt if this group is over; the caller must
  /// then call next_group(). kMismatch if a rank has another world size. kTimeout names the ranks that did not come.
  virtual Result<std::optional<std::vector<RankInfo>>> members(const Deadline& deadline) = 0;
  /// Goes on to the next group of this name.
  virtual Result<> next_group(const Deadline& deadline) = 0;
  /// Called by a rank that announced itself. Marks the group as over, so that ranks that come later join the next group
  /// of the name.
  virtual void give_up(const RankInfo& self) = 0;
  /// A second exchange: every rank gives a text, and all ranks get all texts, in the order of ranks.
  virtual Result<std::vector<std::string>> exchange(const std::string& topic, const std::string& mine,
                                                    const Deadline& deadline) = 0;
};

}  // namespace muster
