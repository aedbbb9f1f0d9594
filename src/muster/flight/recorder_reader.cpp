#include "muster/flight/recorder_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "muster/flight/recorder_layout.h"

namespace muster {
namespace {

std::string site_text(const RecorderSites& sites, uint64_t site) {
  if (site > kMaxCallSites) return "";
  const uint32_t offset = sites.offsets[site].load(std::memory_order_relaxed);
  if (offset == 0 || offset > kSiteTextBytes) return "";
  const char* const begin = sites.texts + offset - 1;
  return {begin, strnlen(begin, kSiteTextBytes - (offset - 1))};
}

Record parse(const RecorderEntry& entry, const RecorderSites& sites, const TickScale& scale) {
  std::array<uint64_t, 4> words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = entry.call[i].load(std::memory_order_relaxed);
  Record record;
  record.call = Call::unpack(words);
  if (const uint64_t kind = words[0] & 0xff; kind == kSendKind || kind == kReceiveKind) {
    record.kind = kind == kSendKind ? Record::Kind::kSend : Record::Kind::kReceive;
    record.peer = record.call.root;
    record.tag = static_cast<uint32_t>(words[2]);
    record.call.sequence = 0;
  }
  record.number = entry.ticket.load(std::memory_order_relaxed);
  record.input_bytes = entry.input_bytes.load(std::memory_order_relaxed);
  record.output_bytes = entry.output_bytes.load(std::memory_order_relaxed);
  const auto time = [&](const std::atomic<int64_t>& ticks) -> std::optional<TimePoint> {
    const int64_t value = ticks.load(std::memory_order_relaxed);
    if (value == 0) return std::nullopt;
    return scale.time_of(value);
  };
  record.submitted = time(entry.submitted);
  record.started = time(entry.started);
  record.ended = time(entry.ended);
  const uint64_t outcome = entry.outcome.load(std::memory_order_relaxed);
  record.state = static_cast<RecordState>(std::clamp<uint64_t>(outcome & 0xff, 1, 4));
  record.error = static_cast<ErrorCode>(std::min<uint64_t>(outcome >> 8 & 0xff, static_cast<uint64_t>(kLastErrorCode)));
  record.blamed = static_cast<Rank>(outcome >> 32);
  record.site = site_text(sites, entry.site.load(std::memory_order_relaxed));
  return record;
}

bool is_span(const RecorderEntry& entry) { return (entry.call[0].load(std::memory_order_relaxed) & 0xff) == kSpanKind; }

RecordedSpan parse_span(const RecorderEntry& entry, const RecorderSites& sites) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  const uint64_t what = entry.call[0].load(kRelaxed);
  RecordedSpan span;
  span.kind = static_cast<Span::Kind>(std::min<uint64_t>(what >> 8 & 0xff, static_cast<uint64_t>(Span::Kind::kBucket)));
  span.bucket = static_cast<uint32_t>(what >> 32);
  span.step = entry.call[1].load(kRelaxed);
  span.bytes = entry.input_bytes.load(kRelaxed);
  span.begin.ns = static_cast<int64_t>(entry.call[2].load(kRelaxed));
  span.full.ns = entry.submitted.load(kRelaxed);
  span.started.ns = entry.started.load(kRelaxed);
  span.end.ns = entry.ended.load(kRelaxed);
  if (span.kind != Span::Kind::kBucket) return span;
  std::istringstream names(site_text(sites, entry.site.load(kRelaxed)));
  for (std::string name; std::getline(names, name);) span.parameters.push_back(name);
  const uint64_t last = entry.output_bytes.load(kRelaxed);
  if (last < span.parameters.size()) span.filled_by = span.parameters[last];
  return span;
}

void parse_entries(const Bytes& copy, const Bytes& again, size_t entries, const TickScale& scale,
                   Recording& recording) {
  const auto& sites = part<RecorderSites>(again, sizeof(RecorderHeader));
  std::vector<std::pair<uint64_t, size_t>> order;
  for (size_t i = 0; i < entries; ++i) {
    const size_t offset = recorder_bytes(i);
    const uint64_t ticket = part<RecorderEntry>(copy, offset).ticket.load(std::memory_order_relaxed);
    // A different ticket in the second copy means that the entry was replaced while it was copied.
    if (ticket == 0 || part<RecorderEntry>(again, offset).ticket.load(std::memory_order_relaxed) != ticket) continue;
    order.emplace_back(ticket, offset);
  }
  std::sort(order.begin(), order.end());
  for (const auto& [ticket, offset] : order) {
    const auto& entry = part<RecorderEntry>(copy, offset);
    if (is_span(entry)) {
      recording.spans.push_back(parse_span(entry, sites));
    } else {
      recording.records.push_back(parse(entry, sites, scale));
    }
  }
}

/// Moves the recordings of messages and of spans into the recording of their group, which comes before or after them.
void join_parts(std::vector<Recording>& recordings) {
  const auto is_part = [](const Recording& recording) {
    return !recording.spans.empty() ||
           (!recording.records.empty() && recording.records.front().kind != Record::Kind::kCollective);
  };
  const auto key = [](const Recording& recording) {
    return std::tie(recording.group, recording.rank, recording.generation);
  };
  std::vector<Recording*> parts;
  for (Recording& recording : recordings) {
    if (is_part(recording)) parts.push_back(&recording);
  }
  for (Recording* part : parts) {
    const auto group = std::find_if(recordings.begin(), recordings.end(), [&](const Recording& other) {
      const bool same = part->group_id == 0 || part->group_id == other.group_id;
      return std::find(parts.begin(), parts.end(), &other) == parts.end() && key(other) == key(*part) && same;
    });
    if (group == recordings.end()) continue;
    group->records.insert(group->records.end(), part->records.begin(), part->records.end());
    group->spans.insert(group->spans.end(), part->spans.begin(), part->spans.end());
    std::stable_sort(group->records.begin(), group->records.end(),
                     [](const Record& a, const Record& b) { return a.submitted < b.submitted; });
    part->size = 0;
  }
  std::erase_if(recordings, [](const Recording& recording) { return recording.size == 0; });
}

}  // namespace

std::string Record::to_string() const {
  if (kind == Kind::kCollective) return call.to_string();
  const bool sends = kind == Kind::kSend;
  const std::string who = peer == kAnyRank ? "any rank" : fmt::format("rank {}", peer);
  return fmt::format("{} {} ({}[{}], tag {})", sends ? "send to" : "receive from", who, name(call.dtype), call.count,
                     tag);
}

std::string Record::with_site() const { return site.empty() ? to_string() : to_string() + " at " + site; }

const Record* Recording::find(uint64_t sequence) const {
  const auto found = std::find_if(records.rbegin(), records.rend(), [&](const Record& record) {
    return record.kind == Record::Kind::kCollective && record.call.sequence == sequence;
  });
  return found == records.rend() ? nullptr : &*found;
}

const Record* Recording::last_begun() const {
  const auto found = std::find_if(records.rbegin(), records.rend(), [](const Record& record) {
    return record.kind == Record::Kind::kCollective && record.state != RecordState::kQueued;
  });
  return found == records.rend() ? nullptr : &*found;
}

Result<Recording> read_recording(const Fd& memory) {
  MUSTER_ASSIGN(const MemoryCopies copies, copy_memory(memory, recorder_bytes(kMaxRecords)));
  const Bytes& copy = copies.first;
  const auto* header = copy.size() < sizeof(RecorderHeader) ? nullptr : &part<RecorderHeader>(copy, 0);
  if (header == nullptr || header->process.magic != kRecorderMagic || copy.size() != recorder_bytes(header->entries)) {
    return fail(ErrorCode::kProtocol, "this is not a recorder of this version");
  }
  Recording recording;
  const TickScale scale = read_header(header->process, recording);
  recording.group = text_of(header->group);
  recording.transport = text_of(header->transport);
  recording.rank = header->rank;
  recording.size = header->size;
  recording.generation = header->generation;
  recording.group_id = header->group_id.load(std::memory_order_acquire);
  parse_entries(copy, copies.second, header->entries, scale, recording);
  return recording;
}

std::vector<Recording> recordings_of(pid_t pid) {
  std::vector<Recording> found = read_memories(pid, kRecorderName, read_recording);
  std::sort(found.begin(), found.end(), [](const Recording& a, const Recording& b) {
    return std::tie(a.group, a.rank) < std::tie(b.group, b.rank);
  });
  join_parts(found);
  return found;
}

std::vector<pid_t> processes_with_recordings() { return processes_with_memory(kRecorderName); }

}  // namespace muster
