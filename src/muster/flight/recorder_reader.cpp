#include "muster/flight/recorder_reader.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "muster/flight/recorder_layout.h"

namespace muster {
namespace {

/// Reads the whole memory at once. It is not mapped, because its process could shrink it while the reader uses the
/// mapping.
Result<Bytes> copy_of(const Fd& memory) {
  struct stat info {};
  if (fstat(memory.get(), &info) != 0) return fail_errno(errno, "cannot look at a recorder");
  if (info.st_size < 0 || static_cast<size_t>(info.st_size) > recorder_bytes(kMaxRecords)) {
    return fail(ErrorCode::kProtocol, "a recorder has an impossible size");
  }
  Bytes bytes(static_cast<size_t>(info.st_size));
  const ssize_t got = pread(memory.get(), bytes.data(), bytes.size(), 0);
  if (got != static_cast<ssize_t>(bytes.size())) return fail_errno(errno, "cannot read a recorder");
  return bytes;
}

template <size_t kSize>
std::string exact_text(const char (&from)[kSize]) {
  return {from, strnlen(from, kSize)};
}

template <size_t kSize>
std::string text_of(const char (&from)[kSize]) {
  std::string text = exact_text(from);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
  return text;
}

/// The object at `offset` of a copy. The caller has checked the offset.
template <class T>
const T& part(const Bytes& copy, size_t offset) {
  return *reinterpret_cast<const T*>(copy.data() + offset);
}

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

/// The PID of the process in its innermost PID namespace. The kernel lists the innermost PID last.
pid_t inner_pid(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("NSpid:")) continue;
    std::istringstream numbers(line.substr(6));
    pid_t inner = pid;
    while (numbers >> inner) {
    }
    return inner;
  }
  return pid;
}

template <class Visit>
void each_entry(const std::string& folder, Visit visit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(folder.c_str()), closedir);
  if (!open) return;
  while (const dirent* entry = readdir(open.get())) visit(std::string(entry->d_name));
}

bool is_recorder(const std::string& path) {
  char target[64];
  const ssize_t size = readlink(path.c_str(), target, sizeof(target));
  return size > 0 &&
         std::string_view(target, static_cast<size_t>(size)).starts_with(std::string("/memfd:") + kRecorderName);
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

bool Recording::of_job(const std::string& name) const {
  return !name.empty() && run_id == name.substr(0, sizeof(RecorderHeader::run_id) - 1);
}

Result<Recording> read_recording(const Fd& memory) {
  MUSTER_ASSIGN(const Bytes copy, copy_of(memory));
  MUSTER_ASSIGN(const Bytes again, copy_of(memory));
  const auto fits = [&](const Bytes& bytes) {
    if (bytes.size() < sizeof(RecorderHeader)) return false;
    const auto& header = part<RecorderHeader>(bytes, 0);
    return header.magic == kRecorderMagic && bytes.size() == recorder_bytes(header.entries);
  };
  if (!fits(copy) || copy.size() != again.size())
    return fail(ErrorCode::kProtocol, "this is not a recorder of this version");
  const auto& header = part<RecorderHeader>(copy, 0);
  Recording recording;
  recording.pid = header.pid;
  recording.host = text_of(header.host);
  recording.group = text_of(header.group);
  recording.transport = text_of(header.transport);
  recording.run_id = exact_text(header.run_id);
  recording.rank = header.rank;
  recording.size = header.size;
  recording.generation = header.generation;
  recording.group_id = header.group_id.load(std::memory_order_acquire);
  recording.wall_clock_offset = header.wall_clock_offset;
  const TickKind kind = header.tick_kind == TickKind::kCounter ? TickKind::kCounter : TickKind::kNanoseconds;
  const Moment now = moment_now(kind);
  recording.taken = TimePoint{now.ns};
  parse_entries(copy, again, header.entries, TickScale(kind, header.made, now), recording);
  return recording;
}

std::vector<Recording> recordings_of(pid_t pid) {
  const std::string folder = fmt::format("/proc/{}/fd/", pid);
  const pid_t owner = inner_pid(pid);
  std::vector<Recording> found;
  each_entry(folder, [&](const std::string& name) {
    if (!is_recorder(folder + name)) return;
    const Fd memory(open((folder + name).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!memory) return;
    if (auto recording = read_recording(memory); recording && recording->pid == owner) {
      recording->stopped = is_stopped(pid);
      found.push_back(std::move(*recording));
    }
  });
  std::sort(found.begin(), found.end(), [](const Recording& a, const Recording& b) {
    return std::tie(a.group, a.rank) < std::tie(b.group, b.rank);
  });
  join_parts(found);
  return found;
}

std::vector<pid_t> processes_with_recordings() {
  std::vector<pid_t> found;
  each_entry("/proc", [&](const std::string& name) {
    pid_t pid = 0;
    const auto read = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (read.ec != std::errc() || read.ptr != name.data() + name.size()) return;
    const std::string folder = "/proc/" + name + "/fd/";
    bool has = false;
    each_entry(folder, [&](const std::string& fd) { has = has || is_recorder(folder + fd); });
    if (has) found.push_back(pid);
  });
  std::sort(found.begin(), found.end());
  return found;
}

bool is_stopped(pid_t pid) {
  std::ifstream stat(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(stat, line);
  const size_t name_end = line.rfind(')');  // a program's name may contain any character
  return name_end != std::string::npos && name_end + 2 < line.size() &&
         (line[name_end + 2] == 'T' || line[name_end + 2] == 't');
}

}  // namespace muster
