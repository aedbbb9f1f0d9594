#include "muster/torch/store.h"

#include <pybind11/chrono.h>

#include "bindings.h"
#include "muster/torch/exception.h"

namespace muster::python {
namespace {

using std::chrono::milliseconds;

c10::intrusive_ptr<c10d::Store> adapted(Result<std::unique_ptr<Store>> store, milliseconds timeout) {
  auto result = c10d_over_store(value_or_throw(std::move(store)));
  result->setTimeout(timeout);
  return result;
}

}  // namespace

void bind_store(py::module_& module) {
  module.def(
      "open_store",
      [](const std::string& url, const py::bytes& secret, milliseconds timeout) {
        const std::string key = secret;
        const py::gil_scoped_release no_gil;
        return adapted(open_store(url, as_bytes(key), Deadline::after(timeout)), timeout);
      },
      py::arg("url"), py::arg("secret"), py::arg("timeout"));
  module.def(
      "store_from_environment",
      [](milliseconds timeout) { return adapted(store_from_environment(Deadline::after(timeout)), timeout); },
      py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace muster::python
