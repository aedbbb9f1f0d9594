#include "muster/rpc/log/call_log_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "muster/rpc/log/call_log_layout.h"

namespace muster::rpc {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

CallSide side_of(uint32_t number) {
  return number == static_cast<uint32_t>(CallSide::kCallee) ? CallSide::kCallee : CallSide::kCaller;
}

FunctionRecord parse_function(const FunctionEntry& entry, double ns_per_tick) {
  FunctionRecord record;
  record.side = side_of(entry.side);
  record.function = text_of(entry.function);
  record.peer = text_of(entry.peer);
  // A call is counted as begun first, so a reader that takes `ended` first never sees more ended than begun.
  record.ended = entry.ended.load(kRelaxed);
  record.failed = entry.failed.load(kRelaxed);
  record.begun = entry.begun.load(kRelaxed);
  record.request_bytes = entry.request_bytes.load(kRelaxed);
  record.reply_bytes = entry.reply_bytes.load(kRelaxed);
  std::vector<uint32_t> counts(kLatencyBuckets);
  for (size_t i = 0; i < counts.size(); ++i) counts[i] = entry.latencies[i].load(kRelaxed);
  record.latencies = Latencies(std::move(counts), ns_per_tick);
  return record;
}

CallRecord parse_call(const CallEntry& entry, const std::vector<FunctionRecord>& functions, const TickScale& scale) {
  CallRecord record;
  const uint64_t what = entry.what.load(kRelaxed);
  if (const size_t function = what >> 16 & 0xffff; function < functions.size()) {
    record.side = functions[function].side;
    record.function = functions[function].function;
    record.peer = functions[function].peer;
  }
  record.peer_id = static_cast<int>(what >> 32);
  record.number = entry.number.load(kRelaxed);
  record.request = entry.request.load(kRelaxed);
  record.request_bytes = entry.request_bytes.load(kRelaxed);
  record.reply_bytes = entry.reply_bytes.load(kRelaxed);
  record.state = static_cast<RecordState>(std::clamp<uint64_t>(what & 0xff, 1, 4));
  record.error = static_cast<ErrorCode>(std::min<uint64_t>(what >> 8 & 0xff, static_cast<uint64_t>(kLastErrorCode)));
  const auto time = [&](const std::atomic<int64_t>& ticks) -> std::optional<TimePoint> {
    const int64_t value = ticks.load(kRelaxed);
    if (value == 0) return std::nullopt;
    return scale.time_of(value);
  };
  record.begun = time(entry.begun);
  record.started = time(entry.started);
  record.ended = time(entry.ended);
  return record;
}

/// The functions in which shutdown() waits for all workers (python/muster/rpc/_leaving.py).
bool waits_by_design(const std::string& function) { return function.starts_with("muster.rpc._leaving:"); }

const CallRecording* find_worker(const std::vector<CallRecording>& workers, uint64_t group_id, int id) {
  const auto found = std::ranges::find_if(
      workers, [&](const CallRecording& other) { return other.group_id == group_id && other.worker.id == id; });
  return found == workers.end() ? nullptr : &*found;
}

bool has_unlogged_calls(const CallRecording& callee) {
  uint64_t counted = 0;
  for (const FunctionRecord& function : callee.functions) {
    if (function.side == CallSide::kCallee) counted += function.under_way();
  }
  const auto logged = std::ranges::count_if(
      callee.calls, [](const CallRecord& call) { return call.side == CallSide::kCallee && call.is_under_way(); });
  return counted > static_cast<uint64_t>(logged);
}

/// What the callee does with a call of `caller`, as the end of a sentence.
std::string describe_callee(const CallRecording* callee, const CallRecording& caller, const CallRecord& call) {
  if (callee == nullptr) return "which was not found on this host";
  if (callee->stopped) return "which is stopped, by a signal or a debugger";
  const bool own = callee == &caller;
  const auto served = std::ranges::find_if(callee->calls, [&](const CallRecord& other) {
    return other.side == CallSide::kCallee && other.is_under_way() && other.peer_id == caller.worker.id &&
           (own ? other.function == call.function : other.request == call.request);
  });
  if (served == callee->calls.end()) {
    return has_unlogged_calls(*callee) ? "whose log has no room for all its calls" : "which does not have the call";
  }
  const auto since = [&](const std::optional<TimePoint>& time) {
    return std::chrono::duration<double>(callee->taken - time.value_or(callee->taken)).count();
  };
  if (served->state == RecordState::kRunning)
    return fmt::format("which has been in it for {:.1f} s", since(served->started));
  return fmt::format("which has had it for {:.1f} s and has not begun it", since(served->begun));
}

std::string describe_wait(const std::vector<CallRecording>& workers, const CallRecording& caller,
                          const CallRecord& call, double seconds) {
  const std::string start = fmt::format("RPC group \"{}\": {} has waited {:.1f} s for \"{}\" at ", caller.group,
                                        caller.who(), seconds, call.function);
  if (call.peer_id < 0) return fmt::format("{}worker \"{}\", which has not joined", start, call.peer);
  const CallRecording* const callee = find_worker(workers, caller.group_id, call.peer_id);
  const std::string who = callee != nullptr ? callee->who() : WorkerInfo{call.peer, call.peer_id}.to_string();
  if (call.state == RecordState::kQueued) return fmt::format("{}{}, and has not sent the call", start, who);
  return fmt::format("{}{}, {}", start, who, describe_callee(callee, caller, call));
}

}  // namespace

std::string CallRecord::to_string() const {
  const std::string what =
      side == CallSide::kCaller ? fmt::format("call of \"{}\" at", function) : fmt::format("\"{}\" for", function);
  const std::string number = request != 0 ? fmt::format("request {}, ", request) : "";
  const std::string reply = state == RecordState::kDone ? fmt::format(", reply {} bytes", reply_bytes) : "";
  return fmt::format("{} worker \"{}\" ({}{} bytes{})", what, peer, number, request_bytes, reply);
}

Latencies Latencies::since(const Latencies& earlier) const {
  std::vector<uint32_t> counts = counts_;
  for (size_t i = 0; i < counts.size() && i < earlier.counts_.size(); ++i) counts[i] -= earlier.counts_[i];
  return {std::move(counts), scale_};
}

std::optional<Duration> Latencies::percentile(double part) const {
  const uint64_t all = std::accumulate(counts_.begin(), counts_.end(), uint64_t{0});
  if (all == 0) return std::nullopt;
  const double wanted = part * static_cast<double>(all);
  uint64_t passed = 0;
  size_t bucket = 0;
  for (; bucket + 1 < counts_.size(); ++bucket) {
    passed += counts_[bucket];
    if (static_cast<double>(passed) >= wanted && passed > 0) break;
  }
  return Duration(static_cast<int64_t>(std::clamp(middle_of(bucket) * scale_, 0.0, 4e18)));
}

std::string CallRecording::who() const {
  return fmt::format("worker \"{}\" (id {}, host {}, pid {})", worker.name, worker.id, host, pid);
}

std::vector<CallRecord> CallRecording::last_calls(size_t most) const {
  const size_t first = calls.size() - std::min(most, calls.size());
  std::vector<CallRecord> chosen;
  for (size_t i = 0; i < first && chosen.size() < most; ++i) {
    if (calls[i].is_under_way()) chosen.push_back(calls[i]);
  }
  chosen.insert(chosen.end(), calls.begin() + static_cast<std::ptrdiff_t>(first), calls.end());
  return chosen;
}

Result<CallRecording> read_call_log(const Fd& memory) {
  MUSTER_ASSIGN(const MemoryCopies copies, copy_memory(memory, call_log_bytes(kMaxCallEntries)));
  const Bytes& copy = copies.first;
  const auto* header = copy.size() < sizeof(CallLogHeader) ? nullptr : &part<CallLogHeader>(copy, 0);
  if (header == nullptr || header->process.magic != kCallLogMagic || copy.size() != call_log_bytes(header->calls)) {
    return fail(ErrorCode::kProtocol, "this is not a call log of this version");
  }
  CallRecording recording;
  const TickScale scale = read_header(header->process, recording);
  recording.group = text_of(header->group);
  recording.group_id = header->group_id;
  recording.worker = {text_of(header->worker), header->worker_id};
  // From the second copy, which has all functions that the first one's calls refer to.
  const size_t functions = part<CallLogHeader>(copies.second, 0).functions.load(std::memory_order_acquire);
  for (size_t i = 0; i < std::min(functions, kMaxFunctionEntries); ++i) {
    const size_t offset = sizeof(CallLogHeader) + i * sizeof(FunctionEntry);
    recording.functions.push_back(parse_function(part<FunctionEntry>(copies.second, offset), scale.ns_per_tick()));
  }
  for (size_t i = 0; i < header->calls; ++i) {
    const size_t offset = call_log_bytes(i);
    const auto& entry = part<CallEntry>(copy, offset);
    const uint64_t number = entry.number.load(kRelaxed);
    // A different number in the second copy means that the entry was replaced while it was copied.
    if (number == 0 || part<CallEntry>(copies.second, offset).number.load(kRelaxed) != number) continue;
    recording.calls.push_back(parse_call(entry, recording.functions, scale));
  }
  std::ranges::sort(recording.calls, {}, &CallRecord::number);
  return recording;
}

std::vector<CallRecording> call_logs_of(pid_t pid) {
  std::vector<CallRecording> found = read_memories(pid, kCallLogName, read_call_log);
  std::ranges::sort(found, {}, [](const CallRecording& one) { return std::tie(one.group, one.worker.id); });
  return found;
}

std::vector<pid_t> processes_with_call_logs() { return processes_with_memory(kCallLogName); }

std::string describe_waits(const std::vector<CallRecording>& workers, size_t most) {
  struct Wait {
    double seconds;
    const CallRecording* caller;
    const CallRecord* call;
  };
  std::vector<Wait> waits;
  for (const CallRecording& caller : workers) {
    for (const CallRecord& call : caller.calls) {
      if (call.side != CallSide::kCaller || !call.is_under_way() || waits_by_design(call.function)) continue;
      const double seconds = std::chrono::duration<double>(caller.taken - call.begun.value_or(caller.taken)).count();
      if (seconds > 1) waits.push_back({seconds, &caller, &call});
    }
  }
  std::ranges::stable_sort(waits, std::ranges::greater(), &Wait::seconds);
  std::string text;
  for (size_t i = 0; i < std::min(most, waits.size()); ++i) {
    text += describe_wait(workers, *waits[i].caller, *waits[i].call, waits[i].seconds) + "\n";
  }
  if (waits.size() > most) text += fmt::format("and {} more calls that wait\n", waits.size() - most);
  return text;
}

}  // namespace muster::rpc
