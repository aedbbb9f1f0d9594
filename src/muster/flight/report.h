#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/collective/rank_info.h"
#include "muster/flight/recorder_reader.h"

namespace muster {

/// What is known of a rank when a call has failed.
struct RankState {
  std::string who;             ///< "rank 3 (host b, pid 812)"
  bool known = false;          ///< whether anything below is
  bool stopped = false;        ///< by a signal or a debugger
  bool silent = false;         ///< it was asked for a sign of life, and gave none
  std::optional<Record> here;  ///< its call of the same number, if it has begun it
  std::optional<Record> last;  ///< the last that it has begun
};

/// Who is where, in one sentence.
struct Report {
  std::string text;  ///< empty when it would say no more than that all ranks are in the same call
  bool mismatch = false;
  Rank culprit = kNoRank;  ///< who is stopped, else has not arrived, else calls something else
};

/// `sightings` by rank: "rank 2 is at broadcast #18 (float32[10], root 0) at train.py:80, the others at all_reduce #18
/// (float32[12], sum) at train.py:71; rank 5 (host b, pid 812) has not arrived, last seen at barrier #17 at
/// train.py:69". Before a deadline has passed, those who have not arrived may just be on their way: they are left out.
enum class When : uint8_t { kInTime, kTooLate };
Report compose_report(const std::vector<RankState>& rank_states, Rank self, When when = When::kTooLate);

/// What a rank's recording says of the call of that number.
RankState rank_state_of(const Recording& recording, std::string who, uint64_t sequence);
/// Reads the recorders of those members of a group that run on this host, stopped ones too; nothing is known of the
/// others.
std::vector<RankState> collect_rank_states(const std::vector<RankInfo>& members, uint64_t group_id, Rank self,
                                           uint64_t sequence);

/// "ranks 0-2, 5".
std::string list_ranks(const std::vector<Rank>& ranks);

}  // namespace muster
