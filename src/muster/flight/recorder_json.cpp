#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "muster/flight/recorder_reader.h"

namespace muster {
namespace {

using nlohmann::json;

std::string dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

const char* operation_name(const Record& record) {
  if (record.kind == Record::Kind::kCollective) return name(record.call.collective);
  return record.kind == Record::Kind::kSend ? "send" : "receive";
}

double microseconds(Duration duration) { return std::chrono::duration<double, std::micro>(duration).count(); }

/// Describes an operation, with the same keys in a dump and in the arguments of a trace.
json describe(const Record& record) {
  json value = {{"operation", operation_name(record)}, {"text", record.to_string()},
                {"state", name(record.state)},         {"number", record.number},
                {"dtype", name(record.call.dtype)},    {"count", record.call.count},
                {"input_bytes", record.input_bytes},   {"output_bytes", record.output_bytes}};
  if (record.kind == Record::Kind::kCollective) {
    value["sequence"] = record.call.sequence;
    if (reduces(record.call.collective)) value["op"] = name(record.call.op);
    if (has_root(record.call.collective)) value["root"] = record.call.root;
  } else {
    value["peer"] = record.peer == kAnyRank ? json("any") : json(record.peer);
    value["tag"] = record.tag;
  }
  if (!record.site.empty()) value["site"] = record.site;
  if (record.state == RecordState::kFailed) {
    value["error"] = name(record.error);
    if (record.blamed != kNoRank) value["blamed"] = record.blamed;
  }
  return value;
}

json with_times(const Record& record, const Recording& of) {
  json value = describe(record);
  const auto put = [&](const char* key, const std::optional<TimePoint>& time) {
    if (time) value[key] = static_cast<double>(time->ns + of.wall_clock_offset) / 1e9;
  };
  put("submitted", record.submitted);
  put("started", record.started);
  put("ended", record.ended);
  const auto since = record.started ? record.started : record.submitted;
  if (since) value["microseconds"] = microseconds(record.ended.value_or(of.taken) - *since);
  return value;
}

/// The place of a slice in a trace, and the moment from which its times count, in ns.
struct Row {
  int process, thread;
  int64_t zero;
};

/// Metadata of a trace: the name of a process or of a thread.
json naming(const char* what, int process, int thread, const std::string& text) {
  return {{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", text}}}};
}

TimePoint begin_of(const Record& record, const Recording& of) {
  return record.started ? *record.started : record.submitted.value_or(of.taken);
}

int64_t first_begin(const std::vector<Recording>& recordings) {
  int64_t first = INT64_MAX;
  for (const Recording& recording : recordings) {
    for (const Record& record : recording.records) first = std::min(first, begin_of(record, recording).ns);
    for (const Span& span : recording.spans) first = std::min(first, span.begin.ns);
  }
  return first == INT64_MAX ? 0 : first;
}

/// A slice of a trace. Its times count from `row.zero`, because a double could not hold all digits of absolute times.
json slice(const char* category, std::string name, TimePoint begin, TimePoint end, json arguments, const Row& row) {
  return {{"ph", "X"},
          {"cat", category},
          {"name", std::move(name)},
          {"pid", row.process},
          {"tid", row.thread},
          {"ts", static_cast<double>(begin.ns - row.zero) / 1e3},
          {"dur", std::max(0.0, microseconds(end - begin))},
          {"args", std::move(arguments)}};
}

/// The slice of an operation. It begins when the operation started, or when it was submitted if it has not started. It
/// ends when the operation ended, or when the recorder was read if it has not ended.
json operation_slice(const Record& record, const Recording& of, const Row& row) {
  json arguments = describe(record);
  if (record.started && record.submitted) {
    arguments["queued_microseconds"] = microseconds(*record.started - *record.submitted);
  }
  return slice("muster", std::string("muster:") + operation_name(record), begin_of(record, of),
               record.ended.value_or(of.taken), std::move(arguments), row);
}

/// A bucket has three parts: its gradients arrive; it is full and waits for the reductions before it; it is reduced.
void add_span(json& events, const RecordedSpan& span, const Row& row) {
  json arguments = {{"step", span.step}};
  if (span.kind == Span::Kind::kBucket) arguments.update({{"bucket", span.bucket}, {"bytes", span.bytes}});
  if (!span.parameters.empty()) arguments.update({{"parameters", span.parameters}, {"filled by", span.filled_by}});
  const auto add = [&](const char* what, TimePoint begin, TimePoint end) {
    if (end >= begin) events.push_back(slice("step", what, begin, end, arguments, row));
  };
  if (span.kind != Span::Kind::kBucket) return add(name(span.kind), span.begin, span.end);
  if (span.full > span.begin) add("gradients", span.begin, span.full);
  if (span.started > span.full) add("queued", span.full, span.started);
  add("reduction", span.started, span.end);  // may have length 0, if the reduction before it was seen to end late
}

}  // namespace

std::string to_json(const std::vector<Recording>& recordings, size_t last) {
  json all = json::array();
  for (const Recording& recording : recordings) {
    json operations = json::array();
    const size_t skipped = recording.records.size() - std::min(last, recording.records.size());
    for (size_t i = skipped; i < recording.records.size(); ++i) {
      operations.push_back(with_times(recording.records[i], recording));
    }
    all.push_back({{"group", recording.group},
                   {"rank", recording.rank},
                   {"size", recording.size},
                   {"generation", recording.generation},
                   {"group_id", fmt::format("{:016x}", recording.group_id)},
                   {"host", recording.host},
                   {"pid", recording.pid},
                   {"transport", recording.transport},
                   {"operations", std::move(operations)}});
  }
  return dump(all);
}

std::string to_trace(const std::vector<Recording>& recordings) {
  json events = json::array();
  const int64_t zero = first_begin(recordings);
  std::map<std::pair<std::string, pid_t>, int> processes;
  std::map<std::pair<int, std::string>, int> threads;
  for (const Recording& recording : recordings) {
    // A process of the trace is one process of the job. The key includes the host, because PIDs repeat on other hosts.
    const auto [process, fresh] = processes.try_emplace({recording.host, recording.pid}, processes.size() + 1);
    if (fresh) {
      events.push_back(naming("process_name", process->second, 0,
                              fmt::format("rank {} ({}, pid {})", recording.rank, recording.host, recording.pid)));
    }
    const auto row = [&](const std::string& of) {
      const std::string name = fmt::format("group {}, rank {}{}", recording.group, recording.rank, of);
      const auto [thread, fresh] = threads.try_emplace({process->second, name}, threads.size() + 1);
      if (fresh) events.push_back(naming("thread_name", process->second, thread->second, name));
      return Row{process->second, thread->second, zero};
    };
    const Row calls = row("");
    for (const Record& record : recording.records) events.push_back(operation_slice(record, recording, calls));
    for (const RecordedSpan& span : recording.spans) {
      const bool bucket = span.kind == Span::Kind::kBucket;
      add_span(events, span, row(bucket ? fmt::format(", bucket {}", span.bucket) : ", training"));
    }
  }
  json other = {{"begin_monotonic_ns", zero}};
  if (!recordings.empty()) other["begin_ns"] = zero + recordings[0].wall_clock_offset;
  return dump({{"displayTimeUnit", "ns"}, {"otherData", std::move(other)}, {"traceEvents", std::move(events)}});
}

}  // namespace muster
