#include "bindings.h"
#include "muster/steps/step_report.h"
#include "muster/steps/step_stragglers.h"
#include "muster/torch/exception.h"
#include "muster/torch/reducer/reducer.h"

namespace muster::python {
namespace {

/// Returns the seconds from `begin` to `end`, or 0 if `begin` did not happen.
double seconds(TimePoint end, TimePoint begin) {
  return begin.ns == 0 ? 0 : std::chrono::duration<double>(end - begin).count();
}

/// Returns the fields of muster._step.Bucket. `backward`: the time of the step's first gradient.
py::dict describe(const StepReport::Bucket& bucket, TimePoint backward) {
  return py::dict(py::arg("parameters") = bucket.parameters, py::arg("bytes") = bucket.bytes,
                  py::arg("last") = bucket.last, py::arg("first") = seconds(bucket.times.first_ready, backward),
                  py::arg("full") = seconds(bucket.times.ready, backward),
                  py::arg("started") = seconds(bucket.started, backward),
                  py::arg("ended") = seconds(bucket.times.ended, backward));
}

/// Returns the fields of muster._step.StepReport.
py::dict describe(const StepReport& report) {
  const BackwardTimes& times = report.times;
  py::list plan;
  for (const StepReport::Bucket& bucket : report.buckets) plan.append(describe(bucket, times.backward));
  return py::dict(py::arg("step") = times.iteration, py::arg("forward") = seconds(times.backward, times.forward),
                  py::arg("backward") = seconds(times.last_gradient, times.backward),
                  py::arg("waiting") = seconds(times.ended, times.last_gradient),
                  py::arg("communication") = std::chrono::duration<double>(report.communication).count(),
                  py::arg("exposed") = std::chrono::duration<double>(report.exposed).count(),
                  py::arg("overlap_ratio") = report.overlap_ratio(), py::arg("plan") = plan,
                  py::arg("advice") = report.advice, py::arg("_text") = report.to_string(),
                  py::arg("_begin") = (times.forward.ns != 0 ? times.forward : times.backward).ns);
}

py::dict describe_step(const Reducer& reducer) {
  return describe(step_report(reducer.times(), reducer.names(), reducer.bucket_parameters(), reducer.bucket_bytes()));
}

/// Describes a step of another process. `times`: the result of that process's Reducer.times().
py::dict describe_step_from_times(const py::dict& times, const std::vector<std::string>& names,
                                  const std::vector<std::vector<size_t>>& plan, const std::vector<size_t>& bytes) {
  const auto time = [](const py::handle& of, const char* name) { return TimePoint{of[name].cast<int64_t>()}; };
  BackwardTimes seen{times["iteration"].cast<uint64_t>(), time(times, "forward"), time(times, "backward"),
                     time(times, "last_gradient"),        time(times, "ended"),   {}};
  for (const py::handle& bucket : times["buckets"]) {
    seen.buckets.push_back({time(bucket, "first_ready"), time(bucket, "ready"), time(bucket, "begun"),
                            time(bucket, "ended"), bucket["last_parameter"].cast<size_t>()});
  }
  return describe(step_report(std::move(seen), names, plan, bytes));
}

/// Returns the fields of muster._step.StragglerReport.
py::dict describe_stragglers(Reducer& reducer, uint64_t steps) {
  const StragglerReport report = [&] {
    const py::gil_scoped_release unlocked;
    return value_or_throw(find_stragglers(reducer.group(), reducer.history(), steps));
  }();
  py::list ranks;
  for (const StragglerReport::RankStats& rank : report.ranks) {
    ranks.append(py::dict(py::arg("last") = rank.last, py::arg("lag") = rank.lag,
                          py::arg("between_steps") = rank.excess.between_steps,
                          py::arg("forward") = rank.excess.forward, py::arg("backward") = rank.excess.backward));
  }
  const Rank rank = report.slowest_rank();
  const auto slowest = rank == kNoRank ? StragglerReport::RankStats() : report.ranks[rank];
  const double share = rank == kNoRank ? 0 : static_cast<double>(slowest.last) / static_cast<double>(report.steps);
  return py::dict(py::arg("steps") = report.steps,
                  py::arg("rank") = rank == kNoRank ? std::nullopt : std::optional(rank), py::arg("share") = share,
                  py::arg("lag") = slowest.lag, py::arg("is_significant") = report.is_significant(),
                  py::arg("ranks") = ranks, py::arg("_text") = report.to_string());
}

}  // namespace

void bind_step(py::module_& module) {
  module.def("step_report", &describe_step, py::arg("reducer"));
  module.def("step_report_from_times", &describe_step_from_times, py::arg("times"), py::arg("names"), py::arg("plan"),
             py::arg("bytes"));
  module.def("find_stragglers", &describe_stragglers, py::arg("reducer"), py::arg("steps"));
}

}  // namespace muster::python
