#include "muster/torch/step_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "muster/torch/step_units.h"

namespace muster {
namespace {

using nlohmann::json;

std::string parameters_of(const StepReport::Bucket& bucket) {
  if (bucket.parameters.size() < 2) return bucket.parameters.empty() ? "" : bucket.parameters[0];
  return fmt::format("{} ... {} ({})", bucket.parameters.front(), bucket.parameters.back(), bucket.parameters.size());
}

/// A trace's slice; `zero` is what its times count from.
json slice(const char* name, int track, TimePoint begin, TimePoint end, TimePoint zero, json arguments) {
  return {{"ph", "X"},
          {"cat", "muster"},
          {"name", name},
          {"pid", 1},
          {"tid", track},
          {"ts", static_cast<double>((begin - zero).count()) / 1e3},
          {"dur", static_cast<double>((end - begin).count()) / 1e3},
          {"args", std::move(arguments)}};
}

json naming(const char* what, int track, const std::string& text) {
  return {{"ph", "M"}, {"name", what}, {"pid", 1}, {"tid", track}, {"args", {{"name", text}}}};
}

/// Of a bucket: while gradients came, while it was full and its turn had not come, while it was reduced.
void add_slices(json& events, const StepReport::Bucket& bucket, int track, TimePoint zero) {
  const json arguments = {{"bytes", bucket.bytes}, {"parameters", bucket.parameters}, {"filled by", bucket.last}};
  const auto add = [&](const char* name, TimePoint begin, TimePoint end) {
    if (begin.ns != 0 && end > begin) events.push_back(slice(name, track, begin, end, zero, arguments));
  };
  add("gradients", bucket.times.first_ready, bucket.times.ready);
  add("queued", bucket.times.ready, bucket.started);
  add("reduction", bucket.started, bucket.times.ended);
}

}  // namespace

StepReport step_report(BackwardTimes times, const std::vector<std::string>& names,
                       const std::vector<std::vector<size_t>>& plan, const std::vector<size_t>& bytes) {
  StepReport report;
  report.times = std::move(times);
  if (plan.size() != report.times.buckets.size() || bytes.size() != plan.size()) return report;
  TimePoint free;
  for (size_t i = 0; i < plan.size(); ++i) {
    StepReport::Bucket bucket{{}, bytes[i], report.times.buckets[i], {}, {}};
    for (size_t parameter : plan[i]) bucket.parameters.push_back(names.at(parameter));
    if (bucket.times.last_parameter < names.size()) bucket.last = names[bucket.times.last_parameter];
    bucket.started = std::max(bucket.times.begun, std::min(free, bucket.times.ended));
    free = std::max(free, bucket.times.ended);
    report.communication += bucket.reduction();
    report.exposed += std::max(Duration(0), bucket.times.ended - std::max(bucket.started, report.times.waited));
    report.buckets.push_back(std::move(bucket));
  }
  report.advice = advise(report);
  return report;
}

double StepReport::hidden() const {
  if (communication.count() <= 0) return 1;
  return 1 - static_cast<double>(exposed.count()) / static_cast<double>(communication.count());
}

std::string StepReport::to_string() const {
  if (times.iteration == 0) return "no step has been reduced yet";
  std::string text = fmt::format("step {}: ", times.iteration);
  if (times.forward.ns != 0) text += fmt::format("forward {}, ", milliseconds(times.backward - times.forward));
  text += fmt::format("backward {}, then {} of waiting; {} of communication, {:.0f} % of it hidden\n",
                      milliseconds(times.waited - times.backward), milliseconds(times.ended - times.waited),
                      milliseconds(communication), 100 * hidden());
  text += fmt::format("{:>6} {:>9} {:>11} {:>11} {:>11} {:>11}  {}\n", "bucket", "MiB", "first", "full", "begun",
                      "reduced", "parameters (filled by)");
  const auto since = [&](TimePoint time) { return time.ns == 0 ? "-" : milliseconds(time - times.backward); };
  for (size_t i = 0; i < buckets.size(); ++i) {
    const BucketTimes& bucket = buckets[i].times;
    text += fmt::format("{:>6} {:>9} {:>11} {:>11} {:>11} {:>11}  {} ({})\n", i, mebibytes(buckets[i].bytes),
                        since(bucket.first_ready), since(bucket.ready), since(bucket.begun), since(bucket.ended),
                        parameters_of(buckets[i]), buckets[i].last);
  }
  for (const std::string& one : advice) text += "- " + one + "\n";
  return text;
}

std::string StepReport::to_trace(int rank) const {
  const TimePoint zero = times.forward.ns != 0 ? times.forward : times.backward;
  json events = {naming("process_name", 0, fmt::format("rank {}, step {}", rank, times.iteration)),
                 naming("thread_name", 1, "the step")};
  const auto add = [&](const char* name, TimePoint begin, TimePoint end) {
    events.push_back(slice(name, 1, begin, end, zero, json::object()));
  };
  if (times.forward.ns != 0) add("forward", times.forward, times.backward);
  add("backward", times.backward, times.waited);
  add("waiting for reductions", times.waited, times.ended);
  for (size_t i = 0; i < buckets.size(); ++i) {
    const int track = static_cast<int>(i) + 2;
    events.push_back(naming("thread_name", track, fmt::format("bucket {}", i)));
    add_slices(events, buckets[i], track, zero);
  }
  const json trace = {
      {"displayTimeUnit", "ns"}, {"otherData", {{"begin_monotonic_ns", zero.ns}}}, {"traceEvents", std::move(events)}};
  return trace.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace muster
