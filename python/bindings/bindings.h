#pragma once

#include <torch/csrc/utils/pybind.h>

#include "muster/base/error.h"
#include "muster/torch/exception.h"

namespace muster::python {

void bind_errors();
/// Raises the matching class of muster.errors in Python, with the error's rank and context as attributes.
void raise(const Error& error);
/// Raises muster.ArgumentError in Python.
void raise(const ArgumentException& exception);
void bind_backend(py::module_& module);
void bind_group(py::module_& module);
void bind_hooks(py::module_& module);
void bind_optim(py::module_& module);
/// Also installs the call-site probe, so that each call records its call site.
void bind_recorder(py::module_& module);
void bind_reducer(py::module_& module);
void bind_rpc(py::module_& module);
/// Binds the agent behind torch.distributed.rpc.
void bind_rpc_torch_agent(py::module_& module);
/// Binds the reports of a reducer's steps.
void bind_step(py::module_& module);
void bind_store(py::module_& module);

}  // namespace muster::python
