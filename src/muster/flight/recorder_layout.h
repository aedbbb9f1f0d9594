#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "muster/flight/call_site.h"
#include "muster/flight/ticks.h"

// The memory of a flight recorder, as its process writes it and others read it: a memfd named kRecorderName that holds
// one RecorderHeader, a table of call sites and a ring of RecorderEntry. Internal to recorder.cpp and
// recorder_reading.cpp. Readers take nothing in it for granted: it is another process' memory, and changes meanwhile.
namespace muster {

inline constexpr const char* kRecorderName = "muster-recorder";
inline constexpr uint64_t kRecorderMagic = 0x33304345525453ab;  // the last byte first: no text begins so
inline constexpr size_t kMaxRecords = 1 << 16;
inline constexpr size_t kSiteTextBytes = 96 << 10;

struct alignas(128) RecorderHeader {
  uint64_t magic;
  uint32_t entries;  ///< a power of two
  TickKind tick_kind;
  int32_t pid;
  int32_t rank;
  int32_t size;
  uint32_t unused;
  uint64_t generation;
  std::atomic<uint64_t> group_id;
  Moment made;                ///< of this memory; a reader takes a second moment, and has the scale
  int64_t wall_clock_offset;  ///< ns to add to CLOCK_MONOTONIC for the time since 1970
  char group[256];            ///< cut to fit, and closed by a zero; so are those below
  char host[64];
  char transport[24];
  char run_id[256];                  ///< of the job that `muster run` started; else empty
  std::atomic<uint32_t> site_bytes;  ///< of `RecorderSites::texts` that are written
};

struct RecorderSites {
  std::atomic<uint32_t> offsets[kMaxCallSites + 1];  ///< by number: where its text begins, plus one; zero: not here
  char texts[kSiteTextBytes];                        ///< each closed by a zero
};

/// `ticket` counts from 1, for each kind of recorder; it is zero while the rest is being replaced. Single words only,
/// so that a reader needs no lock: whoever sees the same ticket before and after has one operation's words.
struct alignas(128) RecorderEntry {
  std::atomic<uint64_t> ticket;
  std::atomic<uint64_t> call[4];  ///< Call::pack(), or of a message: its kind, count, tag
  std::atomic<uint64_t> input_bytes, output_bytes;
  std::atomic<int64_t> submitted, started, ended;  ///< ticks; zero: not yet
  std::atomic<uint64_t> site;
  std::atomic<uint64_t> outcome;  ///< RecordState, then the ErrorCode << 8 and the rank to blame << 32
};

/// Instead of a collective in the first byte of a message's call[0]; the peer is where a root would be.
inline constexpr uint64_t kSendKind = 0xfe, kReceiveKind = 0xff;
/// Of a span: then its own kind << 8, the bucket << 32; the step; its begin. Its times are no ticks but nanoseconds,
/// the one submitted being when a bucket was full. Its site is the text with a bucket's parameters, its output bytes
/// which line of it.
inline constexpr uint64_t kSpanKind = 0xfd;

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(RecorderEntry) == 128);

inline constexpr size_t recorder_bytes(size_t entries) {
  return sizeof(RecorderHeader) + sizeof(RecorderSites) + entries * sizeof(RecorderEntry);
}

}  // namespace muster
