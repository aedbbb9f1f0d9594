#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/collective/call.h"
#include "muster/flight/process_memory.h"
#include "muster/flight/recorder.h"

namespace muster {

/// One operation, as a recorder holds it.
struct Record {
  enum class Kind : uint8_t { kCollective, kSend, kReceive };
  Kind kind = Kind::kCollective;
  Call call;            ///< of a message: dtype and count; the sequence is zero
  Rank peer = kNoRank;  ///< of a message; kAnyRank for a receive from any rank
  uint32_t tag = 0;     ///< of a message
  uint64_t number = 0;  ///< in the order of the calls, from 1: collectives and messages are counted apart
  size_t input_bytes = 0, output_bytes = 0;
  RecordState state = RecordState::kQueued;
  std::optional<TimePoint> submitted, started, ended;  ///< on steady_clock() of the host
  ErrorCode error = ErrorCode::kInternal;              ///< if it failed
  Rank blamed = kNoRank;                               ///< if it failed
  std::string site;                                    ///< "train.py:71"; empty: not known

  /// "all_reduce #41 (float32[1048576], sum)", "receive from rank 3 (float32[10], tag 7)".
  std::string to_string() const;
  /// The same with the call site: "... at train.py:71".
  std::string with_site() const;
};

/// A span with its names.
struct RecordedSpan : Span {
  std::vector<std::string> parameters;  ///< of a bucket; empty if the recorder had no room for their names
  std::string filled_by;                ///< of a bucket: the parameter whose gradient came last
};

/// The contents of a recorder at one moment.
struct Recording : ProcessState {
  std::string group, transport;
  Rank rank = kNoRank;
  int size = 0;
  uint64_t generation = 0;
  uint64_t group_id = 0;            ///< equal at all ranks of one group, and different in other groups
  std::vector<Record> records;      ///< oldest first
  std::vector<RecordedSpan> spans;  ///< of the training that uses this group; oldest first

  /// The collective with that number; null if the recording does not hold it (not yet, or no longer).
  const Record* find(uint64_t sequence) const;
  /// The last collective that has at least begun.
  const Record* last_begun() const;
};

/// kProtocol for memory that is not a recorder of this version. Operations that change while it reads are left out.
Result<Recording> read_recording(const Fd& memory);
/// The recordings of a process on this host, by group and rank. The process may be stopped. Empty if the kernel does
/// not let this user read them. Recorders that the process inherited by a fork are left out.
std::vector<Recording> recordings_of(pid_t pid);
/// The processes of this user on this host that have recordings.
std::vector<pid_t> processes_with_recordings();
/// JSON for tools: an array with an object for each recording, and at most the `last` operations of each.
std::string to_json(const std::vector<Recording>& recordings, size_t last);
/// A trace for Perfetto and Chrome, of recordings of one host: a process for each rank, a thread for each group, and
/// threads for the parts of training steps. Times count from the first operation. otherData.begin_monotonic_ns is its
/// time on steady_clock(), begin_ns its time since 1970.
std::string to_trace(const std::vector<Recording>& recordings);

}  // namespace muster
