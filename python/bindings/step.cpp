#include "bindings.h"
#include "muster/torch/exception.h"
#include "muster/torch/reducer.h"
#include "muster/torch/step_report.h"
#include "muster/torch/step_stragglers.h"

namespace muster::python {
namespace {

py::dict describe(const StepReport::Bucket& bucket) {
  return py::dict(py::arg("parameters") = bucket.parameters, py::arg("bytes") = bucket.bytes,
                  py::arg("last") = bucket.last, py::arg("first") = bucket.times.first_ready.ns,
                  py::arg("full") = bucket.times.ready.ns, py::arg("started") = bucket.started.ns,
                  py::arg("ended") = bucket.times.ended.ns);
}

py::dict describe_step(const Reducer& reducer) {
  const StepReport report =
      step_report(reducer.times(), reducer.names(), reducer.bucket_parameters(), reducer.bucket_bytes());
  py::list buckets;
  for (const StepReport::Bucket& bucket : report.buckets) buckets.append(describe(bucket));
  const BackwardTimes& times = report.times;
  return py::dict(
      py::arg("step") = times.iteration, py::arg("forward") = times.forward.ns, py::arg("backward") = times.backward.ns,
      py::arg("waited") = times.waited.ns, py::arg("ended") = times.ended.ns, py::arg("buckets") = buckets,
      py::arg("communication") = report.communication.count(), py::arg("exposed") = report.exposed.count(),
      py::arg("hidden") = report.hidden(), py::arg("advice") = report.advice, py::arg("text") = report.to_string());
}

py::dict describe_stragglers(Reducer& reducer, uint64_t steps) {
  const StragglerReport report = [&] {
    const py::gil_scoped_release unlocked;
    return value_or_throw(find_stragglers(reducer.group(), reducer.history(), steps));
  }();
  py::list ranks;
  for (const StragglerReport::OfRank& rank : report.ranks) {
    ranks.append(py::dict(py::arg("last") = rank.last, py::arg("behind") = rank.behind,
                          py::arg("outside") = rank.longer.outside, py::arg("forward") = rank.longer.forward,
                          py::arg("backward") = rank.longer.backward));
  }
  return py::dict(py::arg("steps") = report.steps, py::arg("step") = report.step, py::arg("rank") = report.latest(),
                  py::arg("stands_out") = report.stands_out(), py::arg("ranks") = ranks,
                  py::arg("text") = report.to_string());
}

}  // namespace

void bind_step(py::module_& module) {
  module.def("step_report", &describe_step, py::arg("reducer"));
  module.def("find_stragglers", &describe_stragglers, py::arg("reducer"), py::arg("steps"));
}

}  // namespace muster::python
