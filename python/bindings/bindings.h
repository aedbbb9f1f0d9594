#pragma once

#include <torch/csrc/utils/pybind.h>

namespace muster::python {

void bind_errors();
void bind_backend(py::module_& module);
void bind_store(py::module_& module);

}  // namespace muster::python
