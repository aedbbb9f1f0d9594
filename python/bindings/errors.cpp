#include "bindings.h"

namespace muster::python {

void raise(const Error& error) {
  try {
    const py::object make = py::module_::import("muster.errors").attr("_from_native");
    const py::object exception = make(static_cast<int>(error.code), error.to_string(), error.rank, error.context);
    PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
  } catch (py::error_already_set& failure) {
    failure.restore();  // does not import while the interpreter shuts down
  }
}

void raise(const ArgumentException& exception) {
  try {
    const py::object type = py::module_::import("muster.errors").attr("ArgumentError");
    PyErr_SetString(type.ptr(), exception.what_without_backtrace());
  } catch (py::error_already_set& failure) {
    failure.restore();
  }
}

void bind_errors() {
  // The translator is global, not local to this module, because most exceptions leave through torch's own bindings.
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const ErrorException& exception) {
      raise(exception.error());
    } catch (const ArgumentException& exception) {
      raise(exception);
    }
  });
}

}  // namespace muster::python
