#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "muster/rpc/log/call_log_reader.h"

namespace muster::rpc {
namespace {

using nlohmann::json;

std::string dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

const char* name(CallSide side) { return side == CallSide::kCaller ? "call" : "function"; }

double microseconds(Duration duration) { return std::chrono::duration<double, std::micro>(duration).count(); }

/// Describes a call, with the same keys in a dump and in the arguments of a trace.
json describe(const CallRecord& call) {
  json value = {{"operation", name(call.side)},      {"text", call.to_string()},
                {"state", muster::name(call.state)}, {"number", call.number},
                {"function", call.function},         {"peer", call.peer},
                {"input_bytes", call.request_bytes}, {"output_bytes", call.reply_bytes}};
  if (call.peer_id >= 0) value["peer_id"] = call.peer_id;
  if (call.request != 0) value["request"] = call.request;
  if (call.state == RecordState::kFailed) value["error"] = muster::name(call.error);
  return value;
}

json with_times(const CallRecord& call, const CallRecording& of) {
  json value = describe(call);
  const auto put = [&](const char* key, const std::optional<TimePoint>& time) {
    if (time) value[key] = static_cast<double>(time->ns + of.wall_clock_offset) / 1e9;
  };
  put("submitted", call.begun);
  put("started", call.started);
  put("ended", call.ended);
  if (call.begun) value["microseconds"] = microseconds(call.ended.value_or(of.taken) - *call.begun);
  return value;
}

json describe(const FunctionRecord& function) {
  json value = {{"operation", name(function.side)},
                {"function", function.function},
                {"peer", function.peer},
                {"begun", function.begun},
                {"ended", function.ended},
                {"failed", function.failed},
                {"input_bytes", function.request_bytes},
                {"output_bytes", function.reply_bytes}};
  for (const double part : {0.5, 0.9, 0.99}) {
    const auto latency = function.latencies.percentile(part);
    if (latency) value[fmt::format("p{:.0f}_microseconds", 100 * part)] = microseconds(*latency);
  }
  return value;
}

json describe(const CallRecording& worker, size_t last) {
  json calls = json::array(), functions = json::array();
  for (const CallRecord& call : worker.last_calls(last)) calls.push_back(with_times(call, worker));
  for (const FunctionRecord& function : worker.functions) functions.push_back(describe(function));
  return {{"group", worker.group},
          {"worker", worker.worker.name},
          {"id", worker.worker.id},
          {"group_id", fmt::format("{:016x}", worker.group_id)},
          {"host", worker.host},
          {"pid", worker.pid},
          {"operations", std::move(calls)},
          {"functions", std::move(functions)}};
}

/// The slices of one worker. Calls of a worker overlap, so each goes to the first lane that is free.
class Lanes {
 public:
  Lanes(const CallRecording& worker, int process, int64_t zero) : worker_(worker), process_(process), zero_(zero) {}

  void add(json& events, const CallRecord& call) {
    const TimePoint begin = call.begun.value_or(worker_.taken), end = call.ended.value_or(worker_.taken);
    const int thread = lane(call.side, begin, end, events);
    const json place = {{"pid", process_}, {"tid", thread}, {"ts", static_cast<double>(begin.ns - zero_) / 1e3}};
    json slice = place;
    slice.update({{"ph", "X"},
                  {"cat", "muster"},
                  {"name", fmt::format("{} {}", name(call.side), call.function)},
                  {"dur", std::max(0.0, microseconds(end - begin))},
                  {"args", describe(call)}});
    events.push_back(std::move(slice));
    if (call.request == 0) return;
    // An arrow from the call to its function.
    const bool calls = call.side == CallSide::kCaller;
    json arrow = place;
    arrow.update({{"ph", calls ? "s" : "f"},
                  {"cat", "rpc"},
                  {"name", "request"},
                  {"id", fmt::format("{:x}/{}/{}/{}", worker_.group_id, calls ? worker_.worker.id : call.peer_id,
                                     calls ? call.peer_id : worker_.worker.id, call.request)}});
    if (!calls) arrow["bp"] = "e";
    events.push_back(std::move(arrow));
  }

 private:
  int lane(CallSide side, TimePoint begin, TimePoint end, json& events) {
    std::vector<TimePoint>& ends = side == CallSide::kCaller ? calls_ : functions_;
    size_t lane = 0;
    while (lane < ends.size() && ends[lane] > begin) ++lane;
    // Even numbers for the calls, odd ones for the functions.
    const int thread = static_cast<int>(lane) * 2 + (side == CallSide::kCaller ? 2 : 3);
    if (lane == ends.size()) {
      ends.emplace_back();
      const char* const what = side == CallSide::kCaller ? "calls" : "functions";
      events.push_back({{"ph", "M"},
                        {"name", "thread_name"},
                        {"pid", process_},
                        {"tid", thread},
                        {"args", {{"name", fmt::format("RPC group {}: {} {}", worker_.group, what, lane + 1)}}}});
    }
    ends[lane] = end;
    return thread;
  }

  const CallRecording& worker_;
  const int process_;
  const int64_t zero_;
  std::vector<TimePoint> calls_, functions_;  ///< when the last call of each lane ends
};

}  // namespace

std::string to_json(const std::vector<Recording>& groups, const std::vector<CallRecording>& workers, size_t last) {
  json all = json::parse(muster::to_json(groups, last));
  for (const CallRecording& worker : workers) all.push_back(describe(worker, last));
  return dump(all);
}

std::string to_trace(const std::vector<Recording>& groups, const std::vector<CallRecording>& workers) {
  json trace = json::parse(muster::to_trace(groups));
  json &events = trace["traceEvents"], &other = trace["otherData"];
  int64_t zero = events.empty() ? INT64_MAX : other["begin_monotonic_ns"].get<int64_t>();
  const int64_t groups_zero = zero;
  for (const CallRecording& worker : workers) {
    if (!worker.calls.empty()) zero = std::min(zero, worker.calls.front().begun.value_or(worker.taken).ns);
  }
  if (zero == INT64_MAX) return dump(trace);
  int last_process = 0;
  for (json& event : events) {
    last_process = std::max(last_process, event["pid"].get<int>());
    if (event.contains("ts")) event["ts"] = event["ts"].get<double>() + static_cast<double>(groups_zero - zero) / 1e3;
  }
  for (const CallRecording& worker : workers) {
    events.push_back({{"ph", "M"},
                      {"name", "process_name"},
                      {"pid", ++last_process},
                      {"tid", 0},
                      {"args", {{"name", worker.who()}}}});
    Lanes lanes(worker, last_process, zero);
    for (const CallRecord& call : worker.calls) lanes.add(events, call);
  }
  other["begin_monotonic_ns"] = zero;
  if (!workers.empty()) other["begin_ns"] = zero + workers[0].wall_clock_offset;
  return dump(trace);
}

}  // namespace muster::rpc
