#include "muster/torch/store.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "muster/io/connect/handshake.h"
#include "muster/torch/c10d/store_adapter.h"
#include "muster/torch/exception.h"

namespace muster::python {
namespace {

using std::chrono::milliseconds;

c10::intrusive_ptr<c10d::Store> adapted(Result<std::unique_ptr<Store>> store, milliseconds timeout) {
  auto result = c10d_over_store(value_or_throw(std::move(store)));
  result->setTimeout(timeout);
  return result;
}

// Without an argument it is the secret of the environment.
Bytes secret_of(const std::optional<py::bytes>& given) {
  if (!given) return value_or_throw(secret_from_environment());
  const std::string bytes = *given;
  return to_bytes(bytes);
}

}  // namespace

void bind_store(py::module_& module) {
  py::class_<C10dStoreAdapter, c10d::Store, c10::intrusive_ptr<C10dStoreAdapter>>(module, "Store")
      .def_property_readonly("host",
                             [](const C10dStoreAdapter& store) -> std::optional<std::string> {
                               const auto address = store.address();
                               if (!address) return std::nullopt;
                               return address->host;
                             })
      .def_property_readonly("port", [](const C10dStoreAdapter& store) -> std::optional<int> {
        const auto address = store.address();
        if (!address) return std::nullopt;
        return address->port;
      });
  module.def(
      "open_store",
      [](const std::string& url, const std::optional<py::bytes>& given, milliseconds timeout) {
        const Bytes secret = secret_of(given);
        const py::gil_scoped_release no_gil;
        return adapted(open_store(url, secret, Deadline::after(timeout)), timeout);
      },
      py::arg("url"), py::arg("secret"), py::arg("timeout"));
  module.def(
      "store_from_environment",
      [](milliseconds timeout) { return adapted(store_from_environment(Deadline::after(timeout)), timeout); },
      py::arg("timeout"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace muster::python
