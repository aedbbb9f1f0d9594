#pragma once

#include <sys/types.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "muster/flight/process_memory.h"
#include "muster/flight/recorder_reader.h"
#include "muster/rpc/agent.h"
#include "muster/rpc/log/call_log.h"

namespace muster::rpc {

/// One call, as one of its two workers noted it.
struct CallRecord {
  CallSide side = CallSide::kCaller;
  std::string function;
  std::string peer;      ///< the name of the other worker
  int peer_id = -1;      ///< of the other worker; -1: not known yet
  uint64_t number = 0;   ///< in the order of this worker's calls, from 1
  uint64_t request = 0;  ///< the number by which both sides know it; 0: not sent yet, or a call to itself
  size_t request_bytes = 0, reply_bytes = 0;
  RecordState state = RecordState::kQueued;
  /// On steady_clock() of the host. A call is begun by its caller, or has arrived at its callee; it is started once it
  /// was sent, or once its function runs.
  std::optional<TimePoint> begun, started, ended;
  ErrorCode error = ErrorCode::kInternal;  ///< if it failed

  bool is_under_way() const { return state == RecordState::kQueued || state == RecordState::kRunning; }
  /// `call of "pull" at worker "ps" (request 7, 512 bytes)`, `"pull" for worker "trainer0" (request 7, 512 bytes)`.
  std::string to_string() const;
};

/// How often each latency was measured. It can be subtracted, for the latencies of an interval.
class Latencies {
 public:
  Latencies() = default;
  Latencies(std::vector<uint32_t> counts, double ns_per_tick) : counts_(std::move(counts)), scale_(ns_per_tick) {}

  Latencies since(const Latencies& earlier) const;
  /// The latency that `part` of the calls do not exceed, to within 6 %. Empty if there are no calls.
  std::optional<Duration> percentile(double part) const;

 private:
  std::vector<uint32_t> counts_;  ///< call_log_layout.h: by bucket
  double scale_ = 1;
};

/// The calls of one function with one other worker, since this worker has started.
struct FunctionRecord {
  CallSide side = CallSide::kCaller;
  std::string function, peer;
  uint64_t begun = 0, ended = 0, failed = 0;  ///< calls; those that failed have also ended
  uint64_t request_bytes = 0, reply_bytes = 0;
  Latencies latencies;  ///< of the calls that have ended, from `begun` to `ended`

  uint64_t under_way() const { return begun - std::min(begun, ended); }
};

/// The calls of a worker at one moment.
struct CallRecording : ProcessState {
  std::string group;
  uint64_t group_id = 0;  ///< equal at all workers of one group, and different in other groups
  WorkerInfo worker;
  std::vector<CallRecord> calls;  ///< oldest first
  std::vector<FunctionRecord> functions;

  /// "worker "ps" (id 3, host a, pid 811)".
  std::string who() const;
  /// The last `most` calls, and before them the oldest `most` of those that are under way and not among the last.
  std::vector<CallRecord> last_calls(size_t most) const;
};

/// kProtocol for memory that is not a call log of this version. Calls that change while it reads are left out.
Result<CallRecording> read_call_log(const Fd& memory);
/// The workers of a process on this host. The process may be stopped. Empty if the kernel does not let this user read
/// them.
std::vector<CallRecording> call_logs_of(pid_t pid);
/// The processes of this user on this host that have such workers.
std::vector<pid_t> processes_with_call_logs();

/// Which worker waits for which other one, and what that does: a line for each call that has waited for longer than a
/// second, the longest first, at most `most` of them. Leaves out those in which shutdown() waits. Empty if
/// there is none.
std::string describe_waits(const std::vector<CallRecording>& workers, size_t most);

/// As to_json() and to_trace() in flight/recorder_reader.h, with the groups first and then the workers.
std::string to_json(const std::vector<Recording>& groups, const std::vector<CallRecording>& workers, size_t last);
std::string to_trace(const std::vector<Recording>& groups, const std::vector<CallRecording>& workers);

}  // namespace muster::rpc
