#pragma once

#include "bindings.h"
#include "muster/torch/rpc/value.h"

namespace muster::python {

/// Writes a Python object. None, bool, int, float, str, bytes, list, tuple, dict and tensors of exactly these types get
/// a form of their own, which C++ can read. muster.rpc._pickling writes all others. Needs the GIL, as all functions
/// here do. Throws Python's exceptions.
void write_object(rpc::ValueWriter& out, py::handle object, int depth = 0);
/// Reads what write_object() and C++ have written.
py::object read_object(rpc::ValueReader& in, int depth = 0);

/// Writes or reads a message with one value.
rpc::Message to_message(py::handle object);
py::object from_message(const rpc::Message& message);

}  // namespace muster::python
