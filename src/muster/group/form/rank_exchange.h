#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/base/error.h"
#include "muster/collective/group_spec.h"
#include "muster/collective/rank_info.h"

namespace muster {

/// How the ranks of a group that forms meet. A rank that has no secret calls share_secret() first, then
/// exchange_members().
class RankExchange {
 public:
  virtual ~RankExchange() = default;
  /// The spec, with the name under which the group forms now.
  virtual const GroupSpec& spec() const = 0;

  /// The secret of the group's links, which rank 0 makes.
  virtual Result<Bytes> share_secret(const Deadline& deadline) = 0;
  /// Publishes this rank's record, and waits for the records of all ranks, in the order of ranks. Returns nullopt if
  /// the group of this name is over: spec() has the next name then, and the caller begins again. kAlreadyExists if
  /// another process has announced the same rank; the error names that process. kMismatch if a rank has another world
  /// size. kTimeout names the ranks that did not come.
  virtual Result<std::optional<std::vector<RankInfo>>> exchange_members(RankInfo self, const Deadline& deadline) = 0;
  /// A second exchange: every rank gives a text, and all ranks get all texts, in the order of ranks.
  virtual Result<std::vector<std::string>> exchange(const std::string& topic, const std::string& mine,
                                                    const Deadline& deadline) = 0;
};

}  // namespace muster
