#pragma once

#include <string>
#include <vector>

#include "muster/group/group.h"
#include "muster/group/member.h"

namespace muster {

/// The exchange of addresses through the store, under keys of this group and generation only. Costs a rank two writes
/// and at most three reads, whatever the size. In large groups rank 0 alone reads every record, and the others read its
/// list: one key, which the store's proxies fetch once a node.
class Rendezvous {
 public:
  Rendezvous(Store& store, const Membership& membership);

  /// kAlreadyExists when another process has announced the same rank: names it.
  Result<> announce(const Member& self, const Deadline& deadline);
  /// Waits for rank 0's record.
  Result<Member> leader(const Deadline& deadline);
  /// Waits for all records, in rank order. kMismatch when a size differs; kTimeout names the ranks that did not come.
  Result<std::vector<Member>> members(const Deadline& deadline);
  /// A second round for those who need more than the first told: every rank gives a text, all get all.
  Result<std::vector<std::string>> exchange(const std::string& topic, const std::string& mine,
                                            const Deadline& deadline);

 private:
  Result<std::vector<Bytes>> collect(const std::string& topic, const Deadline& deadline);
  Result<std::vector<Bytes>> read_each(const std::string& topic, const Deadline& deadline);
  Error missing(const std::string& topic, const Error& cause);

  std::unique_ptr<Store> store_;
  Membership membership_;
};

}  // namespace muster
