#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/collective/rank_info.h"
#include "muster/group/group.h"

namespace muster {

/// The exchange of addresses through the store, under keys of this group and generation only. Costs a rank two writes
/// and at most three reads, whatever the size. In large groups rank 0 alone reads every record, and the others read its
/// list: one key, which the store's proxies fetch once a node.
///
/// The store may hold an earlier group of the same name, formed by other processes: then the next one is "name#2", and
/// so on. The ranks agree on the number by the store alone, because a process does not know what the others formed
/// before. A group is over for those that still have to come once all its records are there, or one of its ranks has
/// given up. A rank that finds its place in such a group taken, or learns that a rank of its group gave up, goes on to
/// the next. The first group of a name costs nothing more for this; a later one costs each rank four round trips or so.
class Rendezvous {
 public:
  Rendezvous(Store& store, GroupSpec membership);

  /// With the name by which the group forms now.
  const GroupSpec& membership() const { return membership_; }

  /// False: this group is over, go_on(). kAlreadyExists when another process has announced the same rank: names it.
  Result<bool> announce(const RankInfo& self, const Deadline& deadline);
  /// Waits for rank 0's record.
  Result<RankInfo> leader(const Deadline& deadline);
  /// Waits for all records, in rank order. None: this group is over, go_on(). kMismatch when a size differs; kTimeout
  /// names the ranks that did not come.
  Result<std::optional<std::vector<RankInfo>>> members(const Deadline& deadline);
  /// To the next group of this name.
  Result<> go_on(const Deadline& deadline);
  /// Of a rank that announced itself: tells those that come later, so that they meet its next attempt.
  void give_up(const RankInfo& self);
  /// A second round for those who need more than the first told: every rank gives a text, all get all.
  Result<std::vector<std::string>> exchange(const std::string& topic, const std::string& mine,
                                            const Deadline& deadline);

 private:
  bool large() const;
  Result<bool> is_over(const RankInfo& holder, const Deadline& deadline);
  Result<> await(const std::vector<Key>& keys, const Deadline& deadline);
  Result<std::vector<Bytes>> collect(const std::string& topic, const Deadline& deadline);
  Result<std::vector<Bytes>> read_each(const std::string& topic, const Deadline& deadline);
  Error missing(const std::string& topic, const Error& cause);

  Store& base_;
  GroupSpec membership_;
  std::string name_;  ///< of all groups that this may be one of
  uint64_t number_ = 1;
  std::string holder_;  ///< who had this rank in the first group; empty: nobody
  bool warned_ = false;
  std::unique_ptr<Store> first_;  ///< the keys of the first group, among them "latest": the last that formed, if any
  std::unique_ptr<Store> store_;
};

}  // namespace muster
