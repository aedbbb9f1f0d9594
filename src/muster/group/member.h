#pragma once

#include <sys/types.h>

#include <string>

#include "muster/base/bytes.h"
#include "muster/base/error.h"

namespace muster {

/// What a rank tells the others about itself through the store. The grammar of its record heads member.cpp.
struct Member {
  Rank rank = kNoRank;
  int size = 0;
  pid_t pid = 0;
  std::string host;
  std::string domain;           ///< equal means: can share memory (shared_memory_domain())
  std::string local_address;    ///< its Unix listener: "unix:@..."
  uint64_t process_domain = 0;  ///< the pid namespace: equal means that `pid` means the same
  bool shares_memory = false;   ///< whether it would share memory with those of its domain
  uint64_t instance = kGaveUp;  ///< random: tells two announcements of one rank apart, also within one process
  std::string tuning;           ///< what the choice of algorithms goes by (tuning.h), encoded; rank 0 alone sets it
  Bytes secret;                 ///< of the group's links; rank 0 alone sets it, when the job gave none

  /// In place of an instance: this rank came, and gave up before the others did.
  static constexpr uint64_t kGaveUp = 0;
  bool gave_up() const { return instance == kGaveUp; }
  /// "rank 3 (host b, pid 812)".
  std::string to_string() const;
};

Bytes encode(const Member& member);
/// kMismatch for the record of another version, kProtocol for anything that is not a record.
Result<Member> parse_member(ByteView record);

}  // namespace muster
