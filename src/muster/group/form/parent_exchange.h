#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/group/form/rank_exchange.h"
#include "muster/group/group.h"

namespace muster {

/// Exchanges addresses over another group of the same ranks, by collectives of that group. No message goes to a store.
class ParentExchange final : public RankExchange {
 public:
  /// The group must outlive this object.
  ParentExchange(Group& parent, GroupSpec spec) : parent_(parent), spec_(std::move(spec)) {}

  const GroupSpec& spec() const override { return spec_; }
  Result<Bytes> share_secret(const Deadline& deadline) override;
  Result<std::optional<std::vector<RankInfo>>> exchange_members(RankInfo self, const Deadline& deadline) override;
  Result<std::vector<std::string>> exchange(const std::string& topic, const std::string& mine,
                                            const Deadline& deadline) override;

 private:
  Group& parent_;
  const GroupSpec spec_;
};

}  // namespace muster
