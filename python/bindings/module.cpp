#include <torch/version.h>

#include "bindings.h"
#include "muster/torch/graph/operators.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "muster's native half; use the muster package.";
  module.attr("torch_version") = TORCH_VERSION;
  // torch registers the types that cross the boundary (Store, Backend).
  py::module_::import("torch.distributed");
  muster::graph::define_operators();
  muster::python::bind_errors();
  muster::python::bind_store(module);
  muster::python::bind_backend(module);
  muster::python::bind_group(module);
  muster::python::bind_hooks(module);
  muster::python::bind_optim(module);
  muster::python::bind_recorder(module);
  muster::python::bind_reducer(module);
  muster::python::bind_rpc(module);
  muster::python::bind_rpc_torch_agent(module);
  muster::python::bind_step(module);
}
