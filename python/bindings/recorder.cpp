#include <unistd.h>

#include "bindings.h"
#include "call_site.h"
#include "muster/flight/recorder_reader.h"
#include "muster/rpc/log/call_log_reader.h"

namespace muster::python {

void bind_recorder(py::module_& module) {
  find_call_sites();
  module.def(
      "recordings",
      [](size_t last) { return rpc::to_json(recordings_of(getpid()), rpc::call_logs_of(getpid()), last); },
      py::arg("last"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "trace", [] { return rpc::to_trace(recordings_of(getpid()), rpc::call_logs_of(getpid())); },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace muster::python
