#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/collective/rank_info.h"
#include "muster/group/group.h"

namespace muster {

/// Exchanges the ranks' addresses through the store, under keys of this group and generation only. A rank pays two
/// writes and at most three reads, whatever the size. In large groups only rank 0 reads every record, and the others
/// read its list: one key, which a store proxy fetches once for a node.
///
/// The store may hold an earlier group of the same name, formed by other processes. Then this group becomes "name#2",
/// and so on. The ranks agree on the number through the store alone, because a process does not know which groups the
/// others formed before. A group is over, for a rank that comes now, once all its records are there or one of its ranks
/// has given up. A rank that finds its number taken in such a group, or learns that a rank of its group gave up, goes
/// on to the next group. The first group of a name costs nothing more for this; a later one costs each rank about four
/// round trips.
class RankExchange {
 public:
  RankExchange(Store& store, GroupSpec spec);

  /// With the name under which the group forms now.
  const GroupSpec& spec() const { return spec_; }

  /// False: this group is over, call next_group(). kAlreadyExists, with its name, if another process has announced the
  /// same rank.
  Result<bool> announce(const RankInfo& self, const Deadline& deadline);
  /// Waits for rank 0's record.
  Result<RankInfo> first_rank(const Deadline& deadline);
  /// Waits for all records, by rank. None: this group is over, call next_group(). kMismatch if a size differs; kTimeout
  /// names the ranks that did not come.
  Result<std::optional<std::vector<RankInfo>>> members(const Deadline& deadline);
  /// Goes on to the next group of this name.
  Result<> next_group(const Deadline& deadline);
  /// For a rank that announced itself: tells the ranks that come later, so that they meet its next attempt.
  void give_up(const RankInfo& self);
  /// A second round: every rank gives a text, and all ranks get all texts.
  Result<std::vector<std::string>> exchange(const std::string& topic, const std::string& mine,
                                            const Deadline& deadline);

 private:
  bool large() const;
  Result<bool> is_over(const RankInfo& holder, const Deadline& deadline);
  Result<> wait_for(const std::vector<Key>& keys, const Deadline& deadline);
  Result<std::vector<Bytes>> collect(const std::string& topic, const Deadline& deadline);
  Result<std::vector<Bytes>> read_each(const std::string& topic, const Deadline& deadline);
  Error missing(const std::string& topic, const Error& cause);

  Store& base_;
  GroupSpec spec_;
  std::string name_;  ///< without the number
  uint64_t number_ = 1;
  std::string previous_process_;  ///< which process had this rank in the first group; empty: none
  bool warned_ = false;
  std::unique_ptr<Store> first_;  ///< keys of the first group; its "latest" is the number of the last that formed
  std::unique_ptr<Store> store_;  ///< keys of this group
};

}  // namespace muster
