#pragma once

#include <optional>
#include <string>
#include <vector>

#include "muster/collective/rank_info.h"
#include "muster/flight/recorder_reader.h"

namespace muster {

/// The state of a rank, as far as this process knows it, when a call has failed.
struct RankState {
  std::string who;             ///< "rank 3 (host b, pid 812)"
  bool known = false;          ///< true if anything below is known
  bool stopped = false;        ///< by a signal or a debugger
  bool silent = false;         ///< it did not answer a ping
  std::optional<Record> here;  ///< its call with the same number, if it has begun
  std::optional<Record> last;  ///< the last call that it has begun
};

/// Says which rank is in which call, in one sentence.
struct Report {
  std::string text;  ///< empty if all ranks are in the same call
  bool mismatch = false;
  Rank culprit = kNoRank;  ///< a stopped rank, else one that has not arrived, else one in another call
};

/// `rank_states` is indexed by rank. Example of a text: "rank 2 is at broadcast #18 (float32[10], root 0) at
/// train.py:80, the others at all_reduce #18 (float32[12], sum) at train.py:71; rank 5 (host b, pid 812) has not
/// arrived, last seen at barrier #17 at train.py:69". Before the deadline, ranks that have not arrived may still come,
/// so the report leaves them out.
enum class When : uint8_t { kInTime, kTooLate };
Report compose_report(const std::vector<RankState>& rank_states, Rank self, When when = When::kTooLate);

/// The state of a rank from its recording; `sequence` is the number of the failed call.
RankState rank_state_of(const Recording& recording, std::string who, uint64_t sequence);
/// Reads the recorders of the group's ranks on this host, also of stopped ones. The other ranks stay unknown.
std::vector<RankState> collect_rank_states(const std::vector<RankInfo>& members, uint64_t group_id, Rank self,
                                           uint64_t sequence);

/// "ranks 0-2, 5".
std::string list_ranks(const std::vector<Rank>& ranks);

}  // namespace muster
