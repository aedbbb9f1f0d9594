#include "bindings.h"
#include "muster/steps/step_report.h"
#include "muster/steps/step_stragglers.h"
#include "muster/torch/exception.h"
#include "muster/torch/reducer/reducer.h"

namespace muster::python {
namespace {

py::dict describe(const StepReport::Bucket& bucket) {
  return py::dict(py::arg("parameters") = bucket.parameters, py::arg("bytes") = bucket.bytes,
                  py::arg("last") = bucket.last, py::arg("first") = bucket.times.first_ready.ns,
                  py::arg("full") = bucket.times.ready.ns, py::arg("started") = bucket.started.ns,
                  py::arg("ended") = bucket.times.ended.ns);
}

py::dict describe(const StepReport& report) {
  py::list buckets;
  for (const StepReport::Bucket& bucket : report.buckets) buckets.append(describe(bucket));
  const BackwardTimes& times = report.times;
  return py::dict(py::arg("step") = times.iteration, py::arg("forward") = times.forward.ns,
                  py::arg("backward") = times.backward.ns, py::arg("last_gradient") = times.last_gradient.ns,
                  py::arg("ended") = times.ended.ns, py::arg("buckets") = buckets,
                  py::arg("communication") = report.communication.count(), py::arg("exposed") = report.exposed.count(),
                  py::arg("overlap_ratio") = report.overlap_ratio(), py::arg("advice") = report.advice,
                  py::arg("text") = report.to_string());
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
  return py::dict(py::arg("steps") = report.steps, py::arg("step") = report.step,
                  py::arg("rank") = report.slowest_rank(), py::arg("is_significant") = report.is_significant(),
                  py::arg("ranks") = ranks, py::arg("text") = report.to_string());
}

}  // namespace

void bind_step(py::module_& module) {
  module.def("step_report", &describe_step, py::arg("reducer"));
  module.def("step_report_from_times", &describe_step_from_times, py::arg("times"), py::arg("names"), py::arg("plan"),
             py::arg("bytes"));
  module.def("find_stragglers", &describe_stragglers, py::arg("reducer"), py::arg("steps"));
}

}  // namespace muster::python
