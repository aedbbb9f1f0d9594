#pragma once

#include <sys/types.h>

#include <string>

#include "muster/base/bytes.h"
#include "muster/base/error.h"

namespace muster {

/// What a rank tells the others about itself through the store. The grammar of its record heads member.cpp.
struct RankInfo {
  Rank rank = kNoRank;
  int size = 0;
  pid_t pid = 0;
  std::string host;
  std::string domain;           ///< equal means: can share memory (io/host_identity.h)
  std::string local_address;    ///< its Unix listener: "unix:@..."
  std::string process_domain;   ///< equal means: `pid` means the same process (io/host_identity.h)
  bool shares_memory = false;   ///< whether it would share memory with those of its domain
  uint64_t instance = kGaveUp;  ///< random: tells two announcements of one rank apart, also within one process
  std::string tuning;           ///< what the choice of algorithms goes by (tuning.h), encoded; rank 0 alone sets it
  Bytes secret;                 ///< of the group's links; rank 0 alone sets it, when the job gave none

  /// In place of an instance: this rank came, and gave up before the others did.
  static constexpr uint64_t kGaveUp = 0;
  bool gave_up() const { return instance == kGaveUp; }
  /// "rank 3 (host b, pid 812)".
  std::string to_string() const;
  /// Whether the other's `pid` may be looked at from here. On another host, it is the number of some other process.
  bool shares_processes_with(const RankInfo& other) const;
};

Bytes encode(const RankInfo& member);
/// kMismatch for the record of another version, kProtocol for anything that is not a record.
Result<RankInfo> parse_rank_info(ByteView record);

}  // namespace muster
