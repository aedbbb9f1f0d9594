#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "muster/collective/group_spec.h"
#include "muster/collective/operation.h"
#include "muster/flight/call_site.h"
#include "muster/flight/process_memory.h"

namespace muster {

/// Readers of a recorder's memory see these numbers: append only.
enum class RecordState : uint8_t { kQueued = 1, kRunning = 2, kDone = 3, kFailed = 4 };
const char* name(RecordState state);

/// A part of a training step, for traces. All times are on steady_clock().
struct Span {
  enum class Kind : uint8_t { kForward, kBackward, kWaiting, kBucket };
  Kind kind = Kind::kForward;
  uint64_t step = 0;
  uint32_t bucket = 0;  ///< the number of the bucket; `bytes` is its size
  size_t bytes = 0;
  TimePoint begin, end;     ///< of a bucket: its first gradient; its reduction's end
  TimePoint full, started;  ///< of a bucket: its last gradient; its reduction's begin
  CallSite names = 0;       ///< of a bucket: its parameters, one per line, as Recorder::keep_text() numbered them
  uint32_t last = 0;        ///< of a bucket: the line of the parameter that filled it
};
const char* name(Span::Kind kind);

struct RecorderHeader;
struct RecorderEntry;
struct RecorderSites;

/// A flight recorder: the last operations of a group, with their times, results and call sites. A group has one for its
/// collectives, one for its messages and one for the spans of a training; readers join them. Other processes can read
/// its memory without the help of this one (recorder_reader.h), also while this process hangs or is stopped. The memory
/// is freed when the process ends. An operation costs tens of nanoseconds. Thread-safe, but the calls for one operation
/// must be in order.
class Recorder {
 public:
  /// Identifies an operation for started() and ended().
  using Ticket = uint64_t;
  enum class Start : uint8_t { kLater, kNow };  ///< kNow: the operation also counts as started

  /// A recorder for the last `entries` operations, rounded up to a power of two. Null if `entries` is zero or if there
  /// is no memory, because a group works without a recorder.
  static std::unique_ptr<Recorder> create(const GroupSpec& membership, size_t entries);
  /// The number of entries from MUSTER_RECORDER; 1024 by default.
  static size_t entries_from_environment();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// A collective: its sequence number is its ticket.
  Ticket submitted(const Operation& operation, Start start);
  /// A message to or from `peer`, which may be kAnyRank. It counts as started.
  Ticket sending(const BufferView& data, Rank peer, uint32_t tag, CallSite site);
  Ticket receiving(const BufferView& data, Rank peer, uint32_t tag, CallSite site);
  void started(Ticket ticket);
  void ended(Ticket ticket, const Result<>& result);
  /// Stores a text for Span::names. Zero, the empty text, if there is no room.
  CallSite keep_text(const std::string& text);
  /// Records a span that has ended.
  void record(const Span& span);
  /// For readers: the transport, and a number that is equal at all ranks of the group and unique to it.
  void set_group(const std::string& transport, uint64_t id);

 private:
  explicit Recorder(ProcessMemory memory);
  RecorderEntry* find(Ticket ticket);
  RecorderEntry& replace(Ticket ticket);
  void write(Ticket ticket, const std::array<uint64_t, 4>& call, size_t input_bytes, size_t output_bytes, CallSite site,
             Start start);
  void publish_site(CallSite site);
  bool publish(CallSite site, const std::string& text);

  ProcessMemory memory_;
  RecorderHeader& header_;
  RecorderSites& sites_;
  RecorderEntry* entries_;
  uint64_t mask_;
  TickKind tick_kind_;
  std::atomic<Ticket> last_ = 0;  ///< the last ticket of messages and spans
  std::mutex sites_mutex_;
  CallSite texts_ = 0;  ///< texts that keep_text() has numbered; guarded by sites_mutex_
};

}  // namespace muster
