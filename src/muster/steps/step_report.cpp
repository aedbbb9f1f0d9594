#include "muster/steps/step_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/steps/step_units.h"

namespace muster {
namespace {

std::string parameters_of(const StepReport::Bucket& bucket) {
  if (bucket.parameters.size() < 2) return bucket.parameters.empty() ? "" : bucket.parameters[0];
  return fmt::format("{} ... {} ({})", bucket.parameters.front(), bucket.parameters.back(), bucket.parameters.size());
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
    bucket.started = started(bucket.times, free);
    free = std::max(free, bucket.times.ended);
    report.communication += bucket.reduction();
    report.exposed += std::max(Duration(0), bucket.times.ended - std::max(bucket.started, report.times.last_gradient));
    report.buckets.push_back(std::move(bucket));
  }
  report.advice = advise(report);
  return report;
}

double StepReport::overlap_ratio() const {
  if (communication.count() <= 0) return 1;
  return 1 - static_cast<double>(exposed.count()) / static_cast<double>(communication.count());
}

std::string StepReport::to_string() const {
  if (times.iteration == 0) return "no step has been reduced yet";
  std::string text = fmt::format("step {}: ", times.iteration);
  if (times.forward.ns != 0) text += fmt::format("forward {}, ", milliseconds(times.backward - times.forward));
  text +=
      fmt::format("backward {}, then {} of waiting; {} of communication, {:.0f} % of it overlapped\n",
                  milliseconds(times.last_gradient - times.backward), milliseconds(times.ended - times.last_gradient),
                  milliseconds(communication), 100 * overlap_ratio());
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

}  // namespace muster
