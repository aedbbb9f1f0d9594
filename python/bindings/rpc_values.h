#pragma once

#include <pybind11/gil_safe_call_once.h>

#include "bindings.h"
#include "muster/rpc/ref_service.h"
#include "muster/torch/rpc/alias.h"
#include "muster/torch/rpc/value.h"

namespace muster::python {

/// An object that is made once, and never released, because the interpreter may be gone when this module is. A static
/// object alone would not do: making it may release the GIL, and another thread that waits for the object holds it.
template <class T, class Make>
const T& once(Make make) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<T> stored;
  return stored.call_once_and_store_result(make).get_stored();
}

/// Writes a Python object. None, bool, int, float, str, bytes, list, tuple, dict and tensors of exactly these types get
/// a form of their own, which C++ can read. muster.rpc._pickling writes all others. Needs the GIL, as all functions
/// here do. Throws Python's exceptions.
void write_object(rpc::ValueWriter& out, py::handle object, int depth = 0);
/// Reads what write_object() and C++ have written.
py::object read_object(rpc::ValueReader& in, int depth = 0);

/// muster.rpc.Alias.
struct PyAlias {
  rpc::Alias alias;
  explicit PyAlias(rpc::Alias given) : alias(std::move(given)) {}
  ~PyAlias() {
    const py::gil_scoped_release no_gil;  // as ~PyRef()
    alias.release();
  }
  PyAlias(PyAlias&&) = default;
};

/// A remote reference as muster.rpc.RRef holds it.
struct PyRef {
  rpc::RefPtr ref;
  explicit PyRef(rpc::RefPtr given) : ref(std::move(given)) {}
  ~PyRef() {
    const py::gil_scoped_release no_gil;  // its release is a call
    ref.reset();
  }
  PyRef(PyRef&&) = default;
};

}  // namespace muster::python
