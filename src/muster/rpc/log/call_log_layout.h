#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "muster/flight/process_memory.h"

// The memory of a call log: flight/process_memory.h with the name kCallLogName. It has one CallLogHeader, a table of
// functions and a table of calls. Internal to call_log.cpp and call_log_reader.cpp.
//
// Invariants and memory order.
// - The worker writes with the lock of its endpoint, except for CallEntry::started and the state in CallEntry::what,
//   which the thread that runs the function writes once. Readers never wait.
// - CallEntry::number is a sequence lock, as in flight/recorder_layout.h: zero while the entry is being replaced.
// - FunctionEntry: the texts are written before CallLogHeader::functions grows, which is stored with release. They
// never
//   change. The counters only grow.
namespace muster::rpc {

inline constexpr const char* kCallLogName = "muster-calls";
// Its first byte in memory is 0xab, and no text begins with this byte.
inline constexpr uint64_t kCallLogMagic = 0x3130'4c4c4143'53ab;
inline constexpr size_t kMaxCallEntries = 1 << 16;
/// Functions at peers. The last two entries count all further ones together: calls, and functions that run here.
inline constexpr size_t kMaxFunctionEntries = 512;
/// Each power of two of ticks has so many buckets, so a latency is known to within 6 %.
inline constexpr int kBucketsPerOctave = 8;
inline constexpr int kFirstOctave = 6, kLastOctave = 44;
inline constexpr size_t kLatencyBuckets = (kLastOctave - kFirstOctave) * kBucketsPerOctave;

/// The bucket of a latency: the octave is the position of its highest bit, the next three bits divide it.
constexpr size_t bucket_of(uint64_t ticks) {
  const int octave = std::bit_width(ticks | 1) - 1;
  if (octave < kFirstOctave) return 0;
  if (octave >= kLastOctave) return kLatencyBuckets - 1;
  const auto part = static_cast<size_t>(ticks >> (octave - 3)) % kBucketsPerOctave;
  return static_cast<size_t>(octave - kFirstOctave) * kBucketsPerOctave + part;
}
/// The middle of a bucket, in ticks.
constexpr double middle_of(size_t bucket) {
  const auto octave = static_cast<double>(uint64_t{1} << (kFirstOctave + bucket / kBucketsPerOctave));
  return octave * (1 + (static_cast<double>(bucket % kBucketsPerOctave) + 0.5) / kBucketsPerOctave);
}

struct alignas(64) CallLogHeader {
  ProcessMemoryHeader process;
  uint32_t calls;                   ///< entries
  std::atomic<uint32_t> functions;  ///< entries in use
  int32_t worker_id;
  uint32_t unused;
  uint64_t group_id;
  char group[256];  ///< truncated, and ends with a zero, like the text below
  char worker[256];
};

struct alignas(64) FunctionEntry {
  uint32_t side;
  char function[132];  ///< the last bytes of a longer name
  char peer[64];
  std::atomic<uint64_t> begun, ended, failed, request_bytes, reply_bytes;
  std::atomic<uint32_t> latencies[kLatencyBuckets];
};

struct alignas(64) CallEntry {
  std::atomic<uint64_t> number;  ///< counts from 1
  std::atomic<uint64_t> what;    ///< RecordState, the ErrorCode << 8, the function << 16, the peer's id << 32
  std::atomic<uint64_t> request;
  std::atomic<uint64_t> request_bytes, reply_bytes;
  std::atomic<int64_t> begun, started, ended;  ///< ticks; zero: not yet
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(CallEntry) == 64);

inline constexpr size_t calls_offset() { return sizeof(CallLogHeader) + kMaxFunctionEntries * sizeof(FunctionEntry); }
inline constexpr size_t call_log_bytes(size_t calls) { return calls_offset() + calls * sizeof(CallEntry); }

}  // namespace muster::rpc
