#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/group/form/rank_exchange.h"
#include "muster/store/store.h"

namespace muster {

/// Exchanges the ranks' addresses through a store, under keys of this group and generation only. Each rank makes two
/// writes and at most three reads at any group size. In large groups only rank 0 reads every record. The other ranks
/// read its list, which is one key that a store proxy fetches once for a node.
///
/// The store may hold an earlier group of the same name, formed by other processes. Then this group becomes "name#2",
/// and so on. The ranks agree on the number through the store alone, because a process does not know which groups the
/// others formed before. For a rank that arrives now, a group is over once all its records exist or one of its ranks
/// has given up. A rank goes on to the next group if another process has its rank number in a group that is over, or if
/// a rank of its group gave up. The first group of a name needs no additional round trip for this. A later group costs
/// each rank about four round trips.
class StoreExchange final : public RankExchange {
 public:
  StoreExchange(Store& store, GroupSpec spec);

  const GroupSpec& spec() const override { return spec_; }
  /// Rank 0 makes the secret for its record, so every process that can read the store can join the group.
  Result<Bytes> share_secret(const Deadline& deadline) override;
  Result<std::optional<std::vector<RankInfo>>> exchange_members(RankInfo self, const Deadline& deadline) override;
  Result<std::vector<std::string>> exchange(const std::string& topic, const std::string& mine,
                                            const Deadline& deadline) override;
  /// Waits for rank 0's record.
  Result<RankInfo> first_rank(const Deadline& deadline);

 private:
  /// Publishes this rank's record. False if this group is over.
  Result<bool> announce(const RankInfo& self, const Deadline& deadline);
  /// nullopt if this group is over.
  Result<std::optional<std::vector<RankInfo>>> members(const Deadline& deadline);
  /// Marks the group as over, after announce(), so that ranks that come later join the next group of the name.
  void give_up(const RankInfo& self);
  Result<> next_group(const Deadline& deadline);
  Result<bool> is_over(const RankInfo& holder, const Deadline& deadline);
  Result<> wait_for(const std::vector<Key>& keys, const Deadline& deadline);
  Result<std::vector<Bytes>> collect(const std::string& topic, const Deadline& deadline);
  Result<std::vector<Bytes>> read_each(const std::string& topic, const Deadline& deadline);
  Error missing(const std::string& topic, const Error& cause);

  Store& base_;
  GroupSpec spec_;
  std::string name_;  ///< the name without "#number"
  uint64_t number_ = 1;
  std::string previous_process_;  ///< the process that had this rank in the first group; empty if there was none
  bool warned_ = false;
  Bytes secret_;  ///< that rank 0 has made
  /// Keys of the first group. Its key "latest" is the number of the last group that formed.
  std::unique_ptr<Store> first_;
  std::unique_ptr<Store> store_;  ///< keys of this group
};

}  // namespace muster
