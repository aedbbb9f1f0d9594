#pragma once

#include <sys/types.h>

#include <string>

#include "muster/base/bytes.h"
#include "muster/base/error.h"

namespace muster {

/// The record of a rank, which the rank publishes in the store for the other ranks. The grammar is at the head of
/// rank_info.cpp.
struct RankInfo {
  Rank rank = kNoRank;
  int size = 0;
  pid_t pid = 0;
  std::string host;
  std::string domain;           ///< ranks with equal domains can share memory (io/host_identity.h)
  std::string local_address;    ///< its Unix listener: "unix:@..."
  std::string process_domain;   ///< if equal, `pid` means the same process (io/host_identity.h)
  bool shares_memory = false;   ///< it accepts shared memory with ranks of its domain
  uint64_t instance = kGaveUp;  ///< random, to distinguish two announcements of one rank
  std::string tuning;           ///< encoded Tuning (tuning.h); only rank 0 sets it
  Bytes secret;                 ///< of the group's links; only rank 0 sets it, if the job has none

  /// The instance of a rank that has arrived but has failed before the group formed.
  static constexpr uint64_t kGaveUp = 0;
  bool gave_up() const { return instance == kGaveUp; }
  /// "rank 3 (host b, pid 812)".
  std::string to_string() const;
  /// True if the other rank's `pid` means the same process here. On another host it is another process.
  bool shares_processes_with(const RankInfo& other) const;
};

Bytes encode(const RankInfo& member);
/// kMismatch for a record of another version, kProtocol for other bytes.
Result<RankInfo> parse_rank_info(ByteView record);

}  // namespace muster
