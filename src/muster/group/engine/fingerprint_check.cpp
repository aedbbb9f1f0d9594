#include "muster/group/engine/fingerprint_check.h"

#include <fmt/format.h>
#include <strings.h>

#include <cstdlib>
#include <cstring>

#include "muster/base/log.h"
#include "muster/flight/report.h"

namespace muster {
namespace {

/// A rank's call on the wire. A zero byte ends `site` if the text is shorter than the field.
struct Announcement {
  std::array<uint64_t, 4> call;
  char site[96];
};

Announcement announce(const Operation& operation) {
  Announcement own{operation.call.pack(), {}};
  call_site_text(operation.site).copy(own.site, sizeof(own.site));
  return own;
}

RankState rank_state_of(const Announcement& announcement, const RankInfo& member) {
  Record record{.call = Call::unpack(announcement.call), .state = RecordState::kRunning};
  record.site.assign(announcement.site, strnlen(announcement.site, sizeof(announcement.site)));
  return {.who = member.to_string(), .known = true, .here = record, .last = record};
}

template <class T>
Result<std::vector<T>> gather(std::vector<T> own, size_t ranks, const Exchange& exchange) {
  std::vector<T> all(own.size() * ranks);
  const auto view = [](std::vector<T>& list) {
    return BufferView(list.data(), list.size() * sizeof(T), Dtype::kUint8);
  };
  MUSTER_TRY(exchange(view(own), view(all)));
  return all;
}

/// Each rank must send to each other rank as many elements as that rank expects.
Result<> check_counts(const Operation& operation, const std::vector<RankInfo>& members, const Exchange& exchange) {
  const size_t size = members.size();
  std::vector<uint64_t> own(operation.counts.begin(), operation.counts.end());
  own.insert(own.end(), operation.receive_counts.begin(), operation.receive_counts.end());
  own.resize(2 * size);
  MUSTER_ASSIGN(const auto all, gather(std::move(own), size, exchange));
  for (size_t from = 0; from < size; ++from) {
    for (size_t to = 0; to < size; ++to) {
      const uint64_t sent = all[from * 2 * size + to], expected = all[to * 2 * size + size + from];
      if (sent == expected) continue;
      return fail(
          ErrorCode::kMismatch,
          fmt::format("rank {} sends {} elements to rank {}, which expects {} from it", from, sent, to, expected),
          static_cast<Rank>(from));
    }
  }
  return {};
}

}  // namespace

bool fingerprint_check_enabled() {
  const char* level = std::getenv("MUSTER_DEBUG");
  if (level == nullptr || *level == '\0' || strcasecmp(level, "off") == 0) return false;
  if (strcasecmp(level, "detail") == 0) return true;
  log(LogLevel::kWarning,
      fmt::format("MUSTER_DEBUG is '{}', which is neither detail nor off: calls are not compared before they run",
                  level));
  return false;
}

Result<> check_fingerprints(const Operation& operation, const std::vector<RankInfo>& members, Rank self,
                            const Exchange& exchange) {
  MUSTER_ASSIGN(const auto all, gather(std::vector{announce(operation)}, members.size(), exchange));
  std::vector<RankState> rank_states;
  for (size_t rank = 0; rank < members.size(); ++rank) rank_states.push_back(rank_state_of(all[rank], members[rank]));
  if (const Report report = compose_report(rank_states, self, When::kInTime); report.mismatch) {
    return fail(ErrorCode::kMismatch, report.text + "; all ranks must make the same calls in the same order",
                report.culprit);
  }
  const bool uneven = operation.call.collective == Collective::kAllToAll && !operation.counts.empty();
  return uneven ? check_counts(operation, members, exchange) : Result<>{};
}

}  // namespace muster
