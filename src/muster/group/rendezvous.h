#pragma once

#include <string>
#include <vector>

#include "muster/group/group.h"

namespace muster {

/// What a rank tells the others about itself through the store.
struct Member {
  Rank rank = kNoRank;
  int size = 0;
  pid_t pid = 0;
  std::string host;
  std::string domain;         ///< equal means: can share memory (shared_memory_domain())
  std::string local_address;  ///< its Unix listener: "unix:@..."
  uint64_t instance = 0;      ///< random: tells two announcements of one rank apart, also within one process
  Bytes secret;               ///< of the group's links; rank 0 alone sets it, when the job gave none

  /// "rank 3 (host b, pid 812)".
  std::string to_string() const;
};

/// The exchange of addresses through the store, under keys of this group and generation only. Costs a rank two writes
/// and at most three reads, whatever the size.
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
  Error missing(const std::string& topic, const Error& cause);

  std::unique_ptr<Store> store_;
  Membership membership_;
};

}  // namespace muster
