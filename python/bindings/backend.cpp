#include "muster/torch/backend.h"

#include <pybind11/chrono.h>

#include "bindings.h"

namespace muster::python {
namespace {

using std::chrono::milliseconds;

c10::intrusive_ptr<c10d::Backend> create_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                 milliseconds timeout, const std::string& name, uint64_t generation) {
  return TorchBackend::create(store, {rank, size, name, generation}, timeout);
}

std::string transport(const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto* ours = dynamic_cast<TorchBackend*>(backend.get());
  if (ours == nullptr) throw py::type_error("this process group does not use the muster backend");
  return ours->group().transport();
}

}  // namespace

void bind_backend(py::module_& module) {
  module.def("create_backend", &create_backend, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
             py::arg("name"), py::arg("generation"), py::call_guard<py::gil_scoped_release>());
  module.def("transport", &transport, py::arg("backend"));
}

}  // namespace muster::python
