#include "muster/flight/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace muster {
namespace {

/// Ranks of which the same can be said.
struct Party {
  std::vector<Rank> ranks;
  const Record* record = nullptr;  ///< of the first of them
};

const char* are(const std::vector<Rank>& ranks) { return ranks.size() == 1 ? "is" : "are"; }
const char* have(const std::vector<Rank>& ranks) { return ranks.size() == 1 ? "has" : "have"; }

void append(std::string& text, const std::string& more) { text += (text.empty() ? "" : "; ") + more; }

/// Those for whom `record` gives one, by what `same` holds to be the same; in rank order of their first.
template <class RecordOf, class Same>
std::vector<Party> parties(const std::vector<Sighting>& sightings, RecordOf record_of, Same same) {
  std::vector<Party> found;
  for (size_t i = 0; i < sightings.size(); ++i) {
    const std::optional<Record>& record = record_of(sightings[i]);
    if (!record) continue;
    const auto like =
        std::find_if(found.begin(), found.end(), [&](const Party& p) { return same(*p.record, *record); });
    Party& party = like != found.end() ? *like : found.emplace_back(Party{{}, &*record});
    party.ranks.push_back(static_cast<Rank>(i));
  }
  return found;
}

bool same_call(const Record& a, const Record& b) { return a.call == b.call; }
bool same_place(const Record& a, const Record& b) { return a.call == b.call && a.site == b.site && a.state == b.state; }

/// "rank 3 (host b, pid 812)", or "ranks 3-5" for several.
std::string name_them(const std::vector<Rank>& ranks, const std::vector<Sighting>& sightings) {
  return ranks.size() == 1 ? sightings[ranks[0]].who : list_ranks(ranks);
}

/// The ranks that have begun a call of this number, the minority first.
std::string arrived(const std::vector<Party>& calls, const Party& most) {
  std::string text;
  const char* verb = nullptr;
  for (const Party& party : calls) {
    if (&party == &most) continue;
    text += fmt::format("{}{} {}at {}", text.empty() ? "" : ", ", list_ranks(party.ranks),
                        verb == nullptr ? are(party.ranks) + std::string(" ") : "", party.record->with_site());
    verb = "";
  }
  if (calls.size() == 1) {
    return fmt::format("{} {} at {}", list_ranks(most.ranks), are(most.ranks), most.record->with_site());
  }
  const std::string rest = most.ranks.size() > 1 ? "the others" : list_ranks(most.ranks);
  return fmt::format("{}, {} at {}", text, rest, most.record->with_site());
}

std::string behind(const Party& party, const std::vector<Sighting>& sightings) {
  const std::string who = name_them(party.ranks, sightings);
  if (party.record->state == RecordState::kRunning) {
    return fmt::format("{} {} still in {}", who, are(party.ranks), party.record->with_site());
  }
  return fmt::format("{} {} not arrived, last seen at {}", who, have(party.ranks), party.record->with_site());
}

/// Those who have not begun the call, the furthest behind first; but for the stopped.
std::string late(const std::vector<Sighting>& sightings, Rank& culprit) {
  static const std::optional<Record> kNone;
  std::vector<Party> places = parties(
      sightings, [](const Sighting& s) -> auto& { return s.here || s.stopped ? kNone : s.last; }, same_place);
  std::stable_sort(places.begin(), places.end(),
                   [](const Party& a, const Party& b) { return a.record->call.sequence < b.record->call.sequence; });
  std::vector<Rank> idle, silent;
  for (size_t i = 0; i < sightings.size(); ++i) {
    const Sighting& sighting = sightings[i];
    if (!sighting.known && sighting.silent) silent.push_back(static_cast<Rank>(i));
    if (sighting.known && !sighting.stopped && !sighting.last) idle.push_back(static_cast<Rank>(i));
  }
  std::string text;
  if (!idle.empty()) append(text, fmt::format("{} {} called nothing yet", name_them(idle, sightings), have(idle)));
  for (const Party& party : places) append(text, behind(party, sightings));
  if (!silent.empty()) {
    append(text,
           fmt::format("{} {} no sign of life", name_them(silent, sightings), silent.size() == 1 ? "gives" : "give"));
  }
  culprit = !idle.empty() ? idle[0] : !places.empty() ? places[0].ranks[0] : !silent.empty() ? silent[0] : kNoRank;
  return text;
}

std::string stopped(const std::vector<Sighting>& sightings, Rank& first) {
  std::string text;
  for (size_t i = 0; i < sightings.size(); ++i) {
    const Sighting& sighting = sightings[i];
    if (!sighting.stopped) continue;
    if (first == kNoRank) first = static_cast<Rank>(i);
    append(text, sighting.who + " is stopped, by a signal or a debugger");
    if (sighting.here) {
      text += ", in " + sighting.here->with_site();
    } else if (sighting.last) {
      text += ", last seen at " + sighting.last->with_site();
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

Report compose_report(const std::vector<Sighting>& sightings, Rank self, When when) {
  Report report;
  const auto calls = parties(
      sightings, [](const Sighting& s) -> auto& { return s.here; }, same_call);
  const auto most = std::max_element(calls.begin(), calls.end(),
                                     [](const Party& a, const Party& b) { return a.ranks.size() < b.ranks.size(); });
  report.mismatch = calls.size() > 1;
  for (const Party& party : calls) {
    if (&party == &*most) continue;
    const Rank odd = party.ranks[0] != self ? party.ranks[0] : most->ranks[0];
    if (report.culprit == kNoRank) report.culprit = odd;
  }
  if (when == When::kInTime) {
    if (report.mismatch) report.text = arrived(calls, *most);
    return report;
  }
  Rank missing = kNoRank;
  const std::string who_is_late = late(sightings, missing);
  Rank halted = kNoRank;
  const std::string who_is_stopped = stopped(sightings, halted);
  if (missing != kNoRank) report.culprit = missing;
  if (halted != kNoRank) report.culprit = halted;
  if (report.culprit == kNoRank) return report;
  const bool some_are_late = missing != kNoRank || (halted != kNoRank && !sightings[halted].here);
  if (most != calls.end() && (report.mismatch || some_are_late)) report.text = arrived(calls, *most);
  if (!who_is_late.empty()) append(report.text, who_is_late);
  if (!who_is_stopped.empty()) append(report.text, who_is_stopped);
  return report;
}

Sighting sighting_of(const Recording& recording, std::string who, uint64_t sequence) {
  Sighting sighting;
  sighting.who = std::move(who);
  sighting.known = true;
  sighting.stopped = recording.stopped;
  const Record* here = recording.find(sequence);
  const Record* last = recording.last_begun();
  if (here != nullptr && here->state != RecordState::kQueued) sighting.here = *here;
  if (last != nullptr) sighting.last = *last;
  return sighting;
}

std::vector<Sighting> look_around(const std::vector<Member>& members, uint64_t group_id, Rank self, uint64_t sequence) {
  std::vector<Sighting> sightings(members.size());
  std::map<pid_t, std::vector<Recording>> processes;  // several ranks may be threads of one
  for (const Member& member : members) {
    sightings[member.rank].who = member.to_string();
    if (!members[self].shares_processes_with(member)) continue;
    const auto [process, fresh] = processes.try_emplace(member.pid);
    if (fresh) process->second = recordings_of(member.pid);
    for (const Recording& recording : process->second) {
      if (recording.rank != member.rank || recording.group_id != group_id) continue;
      sightings[member.rank] = sighting_of(recording, member.to_string(), sequence);
    }
  }
  return sightings;
}

}  // namespace muster
