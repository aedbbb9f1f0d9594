#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "muster/flight/process_memory.h"
#include "muster/rpc/call.h"

namespace muster::rpc {

struct CallLogHeader;
struct FunctionEntry;
struct CallEntry;

/// The side of a worker in a call. Part of the layout.
enum class CallSide : uint8_t { kCaller = 1, kCallee = 2 };

/// What a worker notes of one call while it is under way.
struct LoggedCall {
  FunctionEntry* function = nullptr;  ///< null: nothing is noted of this call
  CallEntry* entry = nullptr;         ///< null: the log had no room for it, and only counts it
  int64_t begun = 0;                  ///< ticks
};

/// The calls of a worker, in memory that other processes can read (call_log_reader.h), also while this one hangs or is
/// stopped. It holds all calls that have not ended, then the last ones that have; and for each function and peer their
/// number and latencies. A call costs some tens of nanoseconds. Not thread-safe, but started() may be called at any
/// time from begin() to end() of the same call.
class CallLog {
 public:
  /// A log for the last `calls` calls. Notes nothing if that is zero, or if there is no memory.
  /// `group_id`: equal at all workers of a group, and different in other groups.
  CallLog(size_t calls, const std::string& group, uint64_t group_id, const std::string& worker, int worker_id);

  /// `peer`: the name of the other worker.
  LoggedCall begin(CallSide side, std::string_view function, std::string_view peer, uint64_t request_bytes);
  /// The number by which both sides know the call, and the id of the other worker.
  static void set_request(const LoggedCall& call, int peer_id, uint64_t request);
  /// The caller has sent it, or the callee runs its function.
  void started(const LoggedCall& call) const;
  void end(LoggedCall& call, const CallResult& result);

 private:
  struct Name {
    CallSide side;
    std::string_view function, peer;
    bool operator==(const Name&) const = default;
  };
  struct StoredName {
    CallSide side;
    std::string function, peer;
    explicit(false) operator Name() const { return {side, function, peer}; }
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(const Name& name) const;
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(const Name& a, const Name& b) const { return a == b; }
  };

  uint32_t function_entry(const Name& name);
  static void fill(FunctionEntry& entry, const Name& name);
  CallEntry* take_entry();

  const std::optional<ProcessMemory> memory_;  ///< empty: notes nothing
  CallLogHeader* header_ = nullptr;
  FunctionEntry* functions_ = nullptr;
  CallEntry* calls_ = nullptr;
  std::unordered_map<StoredName, uint32_t, Hash, Equal> indexes_;  ///< of function entries
  /// Entries whose calls have ended, the longest ago first: a ring of all entries' indexes.
  std::vector<uint32_t> free_;
  size_t first_free_ = 0, free_count_ = 0;
  uint64_t last_number_ = 0;
};

}  // namespace muster::rpc
