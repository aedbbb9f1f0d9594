#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "muster/flight/call_site.h"
#include "muster/flight/process_memory.h"

// The memory of a flight recorder: process_memory.h with the name kRecorderName. It has one RecorderHeader, a table of
// call sites and a ring of RecorderEntry. Internal to recorder.cpp and recorder_reader.cpp.
//
// Invariants and memory order. One thread at a time writes an entry; there is no lock, and readers never wait.
// - RecorderEntry::ticket is a sequence lock. The writer stores 0, then a release fence, then the other words, then the
//   ticket with release. A reader copies all memory twice. It uses an entry of the first copy only if both copies have
//   the same ticket and it is not 0: then no other operation replaced the entry while it was copied. Each word is an
//   atomic, so no word is torn. The ticket comes first in an entry, so a copy reads it before the other words.
// - started, ended, outcome change while the ticket stays. Each is one word, and `outcome` is stored with release after
//   the times, so a reader that sees kDone usually sees the end time too. The reader tolerates a missing time.
// - RecorderSites: the text is written first, then its offset with release. A text never changes, so a reader that sees
//   an offset finds its text. The reader takes texts from the second copy, which is newer than the entries.
// - RecorderHeader: all fields are written before the magic number, except group_id, transport and site_bytes.
//   `transport` is written before group_id, which is stored with release. site_bytes is only for the writer, under
//   its mutex.
namespace muster {

inline constexpr const char* kRecorderName = "muster-recorder";
// Its first byte in memory is 0xab, and no text begins with this byte.
inline constexpr uint64_t kRecorderMagic = 0x34304345525453ab;
inline constexpr size_t kMaxRecords = 1 << 16;
inline constexpr size_t kSiteTextBytes = 96 << 10;

struct alignas(128) RecorderHeader {
  ProcessMemoryHeader process;
  uint32_t entries;  ///< a power of two
  int32_t rank;
  int32_t size;
  std::atomic<uint32_t> site_bytes;  ///< used bytes of RecorderSites::texts
  uint64_t generation;
  std::atomic<uint64_t> group_id;
  char group[256];  ///< truncated, and ends with a zero, like the text below
  char transport[24];
};

struct RecorderSites {
  std::atomic<uint32_t> offsets[kMaxCallSites + 1];  ///< by call site: the index of its text, plus one; zero: none
  char texts[kSiteTextBytes];                        ///< each ends with a zero
};

/// `ticket` counts from 1 in each recorder; it is zero while the entry is being replaced.
struct alignas(128) RecorderEntry {
  std::atomic<uint64_t> ticket;
  std::atomic<uint64_t> call[4];  ///< Call::pack(); for a message: its kind, count, tag
  std::atomic<uint64_t> input_bytes, output_bytes;
  std::atomic<int64_t> submitted, started, ended;  ///< ticks; zero: not yet
  std::atomic<uint64_t> site;
  std::atomic<uint64_t> outcome;  ///< RecordState, then the ErrorCode << 8 and the rank to blame << 32
};

/// The first byte of call[0] of a message, where a collective has its kind. A message has its peer where a collective
/// has its root.
inline constexpr uint64_t kSendKind = 0xfe, kReceiveKind = 0xff;
/// The first byte of call[0] of a span. call[0] also holds the span's kind << 8 and the bucket << 32; call[1] the step;
/// call[2] the begin. Its times are nanoseconds, not ticks; `submitted` is the time when the bucket was full. `site` is
/// the text with the bucket's parameters, `output_bytes` the line of the parameter that filled it.
inline constexpr uint64_t kSpanKind = 0xfd;

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(RecorderEntry) == 128);

inline constexpr size_t recorder_bytes(size_t entries) {
  return sizeof(RecorderHeader) + sizeof(RecorderSites) + entries * sizeof(RecorderEntry);
}

}  // namespace muster
