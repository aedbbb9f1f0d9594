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
#include "muster/flight/ticks.h"
#include "muster/io/fd.h"

namespace muster {

/// Sent to readers of the recorder's memory: append only.
enum class RecordState : uint8_t { kQueued = 1, kRunning = 2, kDone = 3, kFailed = 4 };
const char* name(RecordState state);

/// A stretch of a training step, for traces. All times on steady_clock().
struct Span {
  enum class Kind : uint8_t { kForward, kBackward, kWaiting, kBucket };
  Kind kind = Kind::kForward;
  uint64_t step = 0;
  uint32_t bucket = 0;  ///< its number, and below its bytes
  size_t bytes = 0;
  TimePoint begin, end;     ///< of a bucket: its first gradient; its reduction's end
  TimePoint full, started;  ///< of a bucket: its last gradient; its reduction's begin
  CallSite names = 0;       ///< of a bucket: what Recorder::keep_text() gave for its parameters, one a line
  uint32_t last = 0;        ///< of a bucket: which of these lines filled it
};
const char* name(Span::Kind kind);

struct RecorderHeader;
struct RecorderEntry;
struct RecorderSites;

/// A flight recorder: a group's last operations, with their times, results and the places in the program that called
/// them. A group's collectives have one, its messages another, and the spans of a training over it a third: readers put
/// them together again. Kept in memory that other processes can read (recorder_reading.h) without this one's help, so
/// also when it hangs or is stopped; gone when the process is. Some 20 ns an operation. Thread-safe; the calls for one
/// operation come one after the other.
class Recorder {
 public:
  /// Which operation: to be handed to started() and ended().
  using Ticket = uint64_t;
  enum class Start : uint8_t { kLater, kNow };  ///< kNow: started() is called along with it

  /// For the last `entries` operations, rounded up to a power of two. Null when that is zero, or without memory: a
  /// group does without rather than fail.
  static std::unique_ptr<Recorder> create(const GroupSpec& membership, size_t entries);
  /// How many operations are to be kept: MUSTER_RECORDER, or 1024.
  static size_t entries_from_environment();
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// A collective: its sequence number is its ticket.
  Ticket submitted(const Operation& operation, Start start);
  /// A message to or from `peer`, which may be kAnyRank. It is under way at once.
  Ticket sending(const BufferView& data, Rank peer, uint32_t tag, CallSite site);
  Ticket receiving(const BufferView& data, Rank peer, uint32_t tag, CallSite site);
  void started(Ticket ticket);
  void ended(Ticket ticket, const Result<>& result);
  /// Keeps a text for spans to name, in the place of a call site's. Zero, the empty text, once there is no room.
  CallSite keep_text(const std::string& text);
  /// What is over.
  void record(const Span& span);
  /// For those who read: what links the ranks, and a number that all of them have in common and no other group has.
  void set_group(const std::string& transport, uint64_t id);

 private:
  Recorder(void* memory, size_t bytes, Fd fd);
  RecorderEntry* find(Ticket ticket);
  RecorderEntry& replace(Ticket ticket);
  void write(Ticket ticket, const std::array<uint64_t, 4>& call, size_t input_bytes, size_t output_bytes, CallSite site,
             Start start);
  void publish_site(CallSite site);
  bool publish(CallSite site, const std::string& text);

  void* memory_;
  size_t bytes_;
  Fd fd_;  ///< kept open: it is how others find the memory
  RecorderHeader& header_;
  RecorderSites& sites_;
  RecorderEntry* entries_;
  uint64_t mask_;
  TickKind tick_kind_;
  std::atomic<Ticket> last_ = 0;  ///< of messages and spans
  std::mutex sites_mutex_;
  CallSite texts_ = 0;  ///< that keep_text() has numbered
};

}  // namespace muster
