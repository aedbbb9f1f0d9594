#include "muster/flight/recorder.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string_view>

#include "muster/base/log.h"
#include "muster/flight/recorder_layout.h"

namespace muster {
namespace {

constexpr size_t kDefaultRecords = 1024;

uint64_t outcome(RecordState state, ErrorCode code = {}, Rank blamed = kNoRank) {
  return static_cast<uint64_t>(state) | static_cast<uint64_t>(code) << 8 |
         static_cast<uint64_t>(static_cast<uint32_t>(blamed)) << 32;
}

std::array<uint64_t, 4> pack_message(uint64_t kind, const BufferView& data, Rank peer, uint32_t tag) {
  return {kind | static_cast<uint64_t>(data.dtype()) << 8 | static_cast<uint64_t>(static_cast<uint32_t>(peer)) << 32,
          data.count(), tag, 0};
}

}  // namespace

const char* name(RecordState state) {
  static constexpr const char* kNames[] = {"unknown", "queued", "running", "done", "failed"};
  return kNames[state <= RecordState::kFailed ? static_cast<size_t>(state) : 0];
}

const char* name(Span::Kind kind) {
  static constexpr const char* kNames[] = {"forward", "backward", "waiting for reductions", "bucket"};
  return kind <= Span::Kind::kBucket ? kNames[static_cast<size_t>(kind)] : "unknown";
}

size_t Recorder::entries_from_environment() {
  const char* text = std::getenv("MUSTER_RECORDER");
  if (text == nullptr || *text == '\0') return kDefaultRecords;
  size_t entries = 0;
  const char* const end = text + std::strlen(text);
  if (const auto read = std::from_chars(text, end, entries); read.ec == std::errc() && read.ptr == end) return entries;
  log(LogLevel::kWarning, std::string("MUSTER_RECORDER is '") + text + "', not a number of operations: recording 1024");
  return kDefaultRecords;
}

/// The job's generation, for readers: groups of c10d have none in their GroupSpec.
uint64_t generation_of_job(const GroupSpec& membership) {
  for (const char* name : {"MUSTER_GENERATION", "TORCHELASTIC_RESTART_COUNT"}) {
    const char* const text = std::getenv(name);
    if (text == nullptr) continue;
    uint64_t generation = 0;
    const char* const end = text + std::strlen(text);
    if (const auto read = std::from_chars(text, end, generation); read.ec == std::errc()) return generation;
  }
  return membership.generation;
}

std::unique_ptr<Recorder> Recorder::create(const GroupSpec& membership, size_t entries) {
  if (entries == 0) return nullptr;
  entries = std::bit_ceil(std::min(entries, kMaxRecords));
  auto memory = ProcessMemory::create(kRecorderName, recorder_bytes(entries));
  if (!memory) return nullptr;
  auto* header = new (memory->data()) RecorderHeader{};
  header->entries = static_cast<uint32_t>(entries);
  header->rank = membership.rank;
  header->size = membership.size;
  header->generation = generation_of_job(membership);
  put_text(header->group, membership.name);
  header->site_bytes = 1;  // the first text is empty
  memory->publish(kRecorderMagic);
  return std::unique_ptr<Recorder>(new Recorder(std::move(*memory)));
}

Recorder::Recorder(ProcessMemory memory)
    : memory_(std::move(memory)),
      header_(*reinterpret_cast<RecorderHeader*>(memory_.data())),
      // The kernel has zeroed this memory, and zero is the initial value of both tables.
      sites_(*reinterpret_cast<RecorderSites*>(&header_ + 1)),
      entries_(reinterpret_cast<RecorderEntry*>(&sites_ + 1)),
      mask_(header_.entries - 1),
      tick_kind_(header_.process.tick_kind) {}

Recorder::Ticket Recorder::submitted(const Operation& operation, Start start) {
  write(operation.call.sequence, operation.call.pack(), operation.input.bytes(), operation.output.bytes(),
        operation.site, start);
  return operation.call.sequence;
}

Recorder::Ticket Recorder::sending(const BufferView& data, Rank peer, uint32_t tag, CallSite site) {
  const Ticket ticket = ++last_;
  write(ticket, pack_message(kSendKind, data, peer, tag), data.bytes(), 0, site, Start::kNow);
  return ticket;
}

Recorder::Ticket Recorder::receiving(const BufferView& data, Rank peer, uint32_t tag, CallSite site) {
  const Ticket ticket = ++last_;
  write(ticket, pack_message(kReceiveKind, data, peer, tag), 0, data.bytes(), site, Start::kNow);
  return ticket;
}

/// Returns the entry of the oldest operation for a new one. Readers skip it until the new ticket is stored.
RecorderEntry& Recorder::replace(Ticket ticket) {
  RecorderEntry& entry = entries_[ticket & mask_];
  entry.ticket.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  return entry;
}

void Recorder::write(Ticket ticket, const std::array<uint64_t, 4>& call, size_t input_bytes, size_t output_bytes,
                     CallSite site, Start start) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  if (site != 0 && sites_.offsets[site].load(kRelaxed) == 0) publish_site(site);
  RecorderEntry& entry = replace(ticket);
  for (size_t i = 0; i < call.size(); ++i) entry.call[i].store(call[i], kRelaxed);
  entry.input_bytes.store(input_bytes, kRelaxed);
  entry.output_bytes.store(output_bytes, kRelaxed);
  const int64_t now = ticks(tick_kind_);
  entry.submitted.store(now, kRelaxed);
  entry.started.store(start == Start::kNow ? now : 0, kRelaxed);
  entry.ended.store(0, kRelaxed);
  entry.site.store(site, kRelaxed);
  entry.outcome.store(outcome(start == Start::kNow ? RecordState::kRunning : RecordState::kQueued), kRelaxed);
  entry.ticket.store(ticket, std::memory_order_release);
}

/// Null if a later operation has replaced the entry.
RecorderEntry* Recorder::find(Ticket ticket) {
  RecorderEntry& entry = entries_[ticket & mask_];
  return entry.ticket.load(std::memory_order_relaxed) == ticket ? &entry : nullptr;
}

void Recorder::started(Ticket ticket) {
  RecorderEntry* entry = find(ticket);
  if (entry == nullptr) return;
  entry->started.store(ticks(tick_kind_), std::memory_order_relaxed);
  entry->outcome.store(outcome(RecordState::kRunning), std::memory_order_release);
}

void Recorder::ended(Ticket ticket, const Result<>& result) {
  RecorderEntry* entry = find(ticket);
  if (entry == nullptr) return;
  entry->ended.store(ticks(tick_kind_), std::memory_order_relaxed);
  entry->outcome.store(
      result ? outcome(RecordState::kDone) : outcome(RecordState::kFailed, result.error().code, result.error().rank),
      std::memory_order_release);
}

void Recorder::record(const Span& span) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  const Ticket ticket = ++last_;
  RecorderEntry& entry = replace(ticket);
  entry.call[0].store(kSpanKind | static_cast<uint64_t>(span.kind) << 8 | static_cast<uint64_t>(span.bucket) << 32,
                      kRelaxed);
  entry.call[1].store(span.step, kRelaxed);
  entry.call[2].store(static_cast<uint64_t>(span.begin.ns), kRelaxed);
  entry.input_bytes.store(span.bytes, kRelaxed);
  entry.submitted.store(span.full.ns, kRelaxed);
  entry.started.store(span.started.ns, kRelaxed);
  entry.ended.store(span.end.ns, kRelaxed);
  entry.site.store(span.names, kRelaxed);
  entry.output_bytes.store(span.last, kRelaxed);
  entry.ticket.store(ticket, std::memory_order_release);
}

void Recorder::set_group(const std::string& transport, uint64_t id) {
  put_text(header_.transport, transport);
  header_.group_id.store(id, std::memory_order_release);
}

/// Copies the text of a call site to the recorder's memory, once. If there is no room, the site gets the empty text.
void Recorder::publish_site(CallSite site) {
  const std::string text = call_site_text(site);
  const std::lock_guard lock(sites_mutex_);
  if (sites_.offsets[site].load(std::memory_order_relaxed) != 0) return;
  if (!publish(site, text)) sites_.offsets[site].store(1, std::memory_order_relaxed);
}

CallSite Recorder::keep_text(const std::string& text) {
  const std::lock_guard lock(sites_mutex_);
  return texts_ < kMaxCallSites && publish(texts_ + 1, text) ? ++texts_ : 0;
}

/// False if there is no room. Called with sites_mutex_ held.
bool Recorder::publish(CallSite site, const std::string& text) {
  const uint32_t begin = header_.site_bytes.load(std::memory_order_relaxed);
  if (begin + text.size() + 1 > kSiteTextBytes) return false;
  text.copy(sites_.texts + begin, text.size());  // a zero follows it, because the memory was zeroed
  header_.site_bytes.store(begin + static_cast<uint32_t>(text.size()) + 1, std::memory_order_relaxed);
  sites_.offsets[site].store(begin + 1, std::memory_order_release);
  return true;
}

}  // namespace muster
