#include "muster/flight/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace muster {
namespace {

/// Ranks with equal records.
struct RankSet {
  std::vector<Rank> ranks;
  const Record* record = nullptr;  ///< of the first of these ranks
};

const char* are(const std::vector<Rank>& ranks) { return ranks.size() == 1 ? "is" : "are"; }
const char* have(const std::vector<Rank>& ranks) { return ranks.size() == 1 ? "has" : "have"; }

void append(std::string& text, const std::string& more) { text += (text.empty() ? "" : "; ") + more; }

/// Divides the ranks for which `record_of` returns a record into sets. Within a set, all records are the same, as
/// `same` compares them. The sets are in the order of their first ranks.
template <class RecordOf, class Same>
std::vector<RankSet> rank_sets(const std::vector<RankState>& rank_states, RecordOf record_of, Same same) {
  std::vector<RankSet> found;
  for (size_t i = 0; i < rank_states.size(); ++i) {
    const std::optional<Record>& record = record_of(rank_states[i]);
    if (!record) continue;
    const auto like =
        std::find_if(found.begin(), found.end(), [&](const RankSet& p) { return same(*p.record, *record); });
    RankSet& set = like != found.end() ? *like : found.emplace_back(RankSet{{}, &*record});
    set.ranks.push_back(static_cast<Rank>(i));
  }
  return found;
}

bool same_call(const Record& a, const Record& b) { return a.call == b.call; }
bool same_record(const Record& a, const Record& b) {
  return a.call == b.call && a.site == b.site && a.state == b.state;
}

/// "rank 3 (host b, pid 812)", or "ranks 3-5" for several.
std::string name_them(const std::vector<Rank>& ranks, const std::vector<RankState>& rank_states) {
  return ranks.size() == 1 ? rank_states[ranks[0]].who : list_ranks(ranks);
}

/// Describes the ranks that have begun a call with this number, the minority first.
std::string describe_calls(const std::vector<RankSet>& calls, const RankSet& most) {
  std::string text;
  for (const RankSet& set : calls) {
    if (&set == &most && calls.size() > 1) continue;
    const std::string verb = text.empty() ? are(set.ranks) + std::string(" ") : "";
    text += fmt::format("{}{} {}at {}", text.empty() ? "" : ", ", list_ranks(set.ranks), verb, set.record->with_site());
  }
  if (calls.size() == 1) return text;
  const std::string rest = most.ranks.size() > 1 ? "the others" : list_ranks(most.ranks);
  return fmt::format("{}, {} at {}", text, rest, most.record->with_site());
}

std::string describe_late(const RankSet& set, const std::vector<RankState>& rank_states) {
  const std::string who = name_them(set.ranks, rank_states);
  if (set.record->state == RecordState::kRunning) {
    return fmt::format("{} {} still in {}", who, are(set.ranks), set.record->with_site());
  }
  return fmt::format("{} {} not arrived, last seen at {}", who, have(set.ranks), set.record->with_site());
}

/// Describes the ranks that have not begun the call, the furthest behind first. Leaves out stopped ranks.
std::string describe_missing(const std::vector<RankState>& rank_states, Rank& culprit) {
  static const std::optional<Record> kNone;
  std::vector<RankSet> late_sets = rank_sets(
      rank_states, [](const RankState& s) -> auto& { return s.here || s.stopped ? kNone : s.last; }, same_record);
  std::stable_sort(late_sets.begin(), late_sets.end(), [](const RankSet& a, const RankSet& b) {
    return a.record->call.sequence < b.record->call.sequence;
  });
  std::vector<Rank> idle, silent;
  for (size_t i = 0; i < rank_states.size(); ++i) {
    const RankState& rank_state = rank_states[i];
    if (!rank_state.known && rank_state.silent) silent.push_back(static_cast<Rank>(i));
    if (rank_state.known && !rank_state.stopped && !rank_state.last) idle.push_back(static_cast<Rank>(i));
  }
  std::string text;
  if (!idle.empty()) append(text, fmt::format("{} {} made no call yet", name_them(idle, rank_states), have(idle)));
  for (const RankSet& set : late_sets) append(text, describe_late(set, rank_states));
  if (!silent.empty()) {
    append(text, fmt::format("{} {} not answer", name_them(silent, rank_states), silent.size() == 1 ? "does" : "do"));
  }
  culprit = !idle.empty()        ? idle[0]
            : !late_sets.empty() ? late_sets[0].ranks[0]
            : !silent.empty()    ? silent[0]
                                 : kNoRank;
  return text;
}

std::string describe_stopped(const std::vector<RankState>& rank_states, Rank& first) {
  std::string text;
  for (size_t i = 0; i < rank_states.size(); ++i) {
    const RankState& rank_state = rank_states[i];
    if (!rank_state.stopped) continue;
    if (first == kNoRank) first = static_cast<Rank>(i);
    append(text, rank_state.who + " is stopped, by a signal or a debugger");
    if (rank_state.here) {
      text += ", in " + rank_state.here->with_site();
    } else if (rank_state.last) {
      text += ", last seen at " + rank_state.last->with_site();
    }
  }
  return text;
}

}  // namespace

std::string list_ranks(const std::vector<Rank>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (end - i > 1) text += (end - i == 2 ? ", " : "-") + std::to_string(ranks[end - 1]);
    i = end;
  }
  return text;
}

Report compose_report(const std::vector<RankState>& rank_states, Rank self, When when) {
  Report report;
  const auto calls = rank_sets(
      rank_states, [](const RankState& s) -> auto& { return s.here; }, same_call);
  const auto most = std::max_element(
      calls.begin(), calls.end(), [](const RankSet& a, const RankSet& b) { return a.ranks.size() < b.ranks.size(); });
  report.mismatch = calls.size() > 1;
  if (report.mismatch) {
    const RankSet& odd = calls[most == calls.begin() ? 1 : 0];
    report.culprit = odd.ranks[0] != self ? odd.ranks[0] : most->ranks[0];
  }
  if (when == When::kInTime) {
    if (report.mismatch) report.text = describe_calls(calls, *most);
    return report;
  }
  Rank missing = kNoRank;
  const std::string who_is_late = describe_missing(rank_states, missing);
  Rank halted = kNoRank;
  const std::string who_is_stopped = describe_stopped(rank_states, halted);
  if (missing != kNoRank) report.culprit = missing;
  if (halted != kNoRank) report.culprit = halted;
  if (report.culprit == kNoRank) return report;
  const bool some_are_late = missing != kNoRank || (halted != kNoRank && !rank_states[halted].here);
  if (most != calls.end() && (report.mismatch || some_are_late)) report.text = describe_calls(calls, *most);
  if (!who_is_late.empty()) append(report.text, who_is_late);
  if (!who_is_stopped.empty()) append(report.text, who_is_stopped);
  return report;
}

RankState rank_state_of(const Recording& recording, std::string who, uint64_t sequence) {
  RankState rank_state{.who = std::move(who), .known = true, .stopped = recording.stopped};
  const Record* here = recording.find(sequence);
  const Record* last = recording.last_begun();
  if (here != nullptr && here->state != RecordState::kQueued) rank_state.here = *here;
  if (last != nullptr) rank_state.last = *last;
  return rank_state;
}

std::vector<RankState> collect_rank_states(const std::vector<RankInfo>& members, uint64_t group_id, Rank self,
                                           uint64_t sequence) {
  std::vector<RankState> rank_states(members.size());
  std::map<pid_t, std::vector<Recording>> processes;  // several ranks may be threads of one process
  for (const RankInfo& member : members) {
    rank_states[member.rank].who = member.to_string();
    if (!members[self].shares_processes_with(member)) continue;
    const auto [process, fresh] = processes.try_emplace(member.pid);
    if (fresh) process->second = recordings_of(member.pid);
    for (const Recording& recording : process->second) {
      if (recording.rank != member.rank || recording.group_id != group_id) continue;
      rank_states[member.rank] = rank_state_of(recording, member.to_string(), sequence);
    }
  }
  return rank_states;
}

}  // namespace muster
