#include "rpc_values.h"

#include <torch/csrc/autograd/python_variable.h>

#include "muster/torch/exception.h"

namespace muster::python {
namespace {

using rpc::Tag;
using rpc::ValueReader;
using rpc::ValueWriter;

py::object check(PyObject* created) {
  if (created == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(created);
}

std::string_view utf8_of(PyObject* text) {
  Py_ssize_t bytes = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &bytes);
  if (data == nullptr) throw py::error_already_set();
  return {data, static_cast<size_t>(bytes)};
}

std::string_view bytes_of(PyObject* bytes) {
  return {PyBytes_AS_STRING(bytes), static_cast<size_t>(PyBytes_GET_SIZE(bytes))};
}

const py::object& pickling() {
  return once<py::object>([] { return py::module_::import("muster.rpc._pickling"); });
}

/// The pickle, then a list of the tensors and references that it refers to.
void write_pickled(ValueWriter& out, py::handle object, int depth) {
  const py::list parts;
  const py::object pickled = pickling().attr("dumps")(object, parts);
  if (PyBytes_Check(pickled.ptr()) == 0) throw py::type_error("muster.rpc._pickling.dumps() must return bytes");
  out.put_object(bytes_of(pickled.ptr()));
  out.begin_list(parts.size());
  for (const py::handle part : parts) {
    if (THPVariable_Check(part.ptr())) {
      out.put_tensor(THPVariable_Unpack(part.ptr()));
    } else {
      write_object(out, part, depth + 1);
    }
  }
}

/// The class muster.rpc.RRef.
PyTypeObject* ref_class() {
  const auto& type = once<py::object>([] { return py::module_::import("muster.rpc._rref").attr("RRef"); });
  return reinterpret_cast<PyTypeObject*>(type.ptr());
}

/// The class muster.rpc.Alias.
PyTypeObject* alias_class() {
  const auto& type = once<py::object>([] { return py::module_::import("muster._C").attr("RpcAlias"); });
  return reinterpret_cast<PyTypeObject*>(type.ptr());
}

py::object read_pickled(ValueReader& in, int depth) {
  const std::string_view bytes = in.bytes_value();
  const py::bytes pickled(bytes.data(), bytes.size());
  return pickling().attr("loads")(pickled, read_object(in, depth + 1));
}

void write_integer(ValueWriter& out, PyObject* object) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow != 0) return write_pickled(out, object, 0);
  out.put_int(value);
}

py::object read_list(ValueReader& in, int depth) {
  const size_t count = in.count();
  py::object list = check(PyList_New(0));
  for (size_t i = 0; i < count; ++i) {
    if (PyList_Append(list.ptr(), read_object(in, depth + 1).ptr()) != 0) throw py::error_already_set();
  }
  return list;
}

py::object read_dict(ValueReader& in, int depth) {
  const size_t count = in.count();
  py::object dict = check(PyDict_New());
  for (size_t i = 0; i < count; ++i) {
    const py::object key = read_object(in, depth + 1);
    if (PyDict_SetItem(dict.ptr(), key.ptr(), read_object(in, depth + 1).ptr()) != 0) throw py::error_already_set();
  }
  return dict;
}

/// True if tensors of this class are written as such. Others are pickled. A parameter is pickled too, so that it
/// arrives as one; but not in a context of distributed autograd, where its gradient comes back.
bool is_writable_tensor(PyObject* object, const ValueWriter& out) {
  if (!THPVariable_CheckExact(object) || THPVariable_Unpack(object).layout() != c10::kStrided) return false;
  return out.context() != nullptr || Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

}  // namespace

void write_object(ValueWriter& out, py::handle handle, int depth) {
  PyObject* const object = handle.ptr();
  if (depth >= rpc::kMaxDepth) return write_pickled(out, handle, depth);  // it may contain itself
  if (object == Py_None) return out.put_none();
  if (PyBool_Check(object)) return out.put_bool(object == Py_True);
  if (PyLong_CheckExact(object)) return write_integer(out, object);
  if (PyFloat_CheckExact(object)) return out.put_float(PyFloat_AS_DOUBLE(object));
  if (PyUnicode_CheckExact(object)) return out.put_string(utf8_of(object));
  if (PyBytes_CheckExact(object)) return out.put_bytes(bytes_of(object));
  if (is_writable_tensor(object, out)) return out.put_tensor(THPVariable_Unpack(object));
  if (PyTuple_CheckExact(object)) {
    const Py_ssize_t count = PyTuple_GET_SIZE(object);
    out.begin_tuple(count);
    for (Py_ssize_t i = 0; i < count; ++i) write_object(out, PyTuple_GET_ITEM(object, i), depth + 1);
    return;
  }
  if (PyList_CheckExact(object)) {
    // A copy, because pickling an item may run code that changes the list.
    const py::object items = check(PyList_AsTuple(object));
    const Py_ssize_t count = PyTuple_GET_SIZE(items.ptr());
    out.begin_list(count);
    for (Py_ssize_t i = 0; i < count; ++i) write_object(out, PyTuple_GET_ITEM(items.ptr(), i), depth + 1);
    return;
  }
  if (PyDict_CheckExact(object)) {
    const py::object items = check(PyDict_Items(object));
    const Py_ssize_t count = PyList_GET_SIZE(items.ptr());
    out.begin_dict(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const item = PyList_GET_ITEM(items.ptr(), i);
      write_object(out, PyTuple_GET_ITEM(item, 0), depth + 1);
      write_object(out, PyTuple_GET_ITEM(item, 1), depth + 1);
    }
    return;
  }
  if (Py_TYPE(object) == alias_class()) return out.put_alias(handle.cast<const PyAlias&>().alias);
  if (Py_TYPE(object) == ref_class()) return out.put_ref(handle.attr("_ref").cast<const PyRef&>().ref);
  write_pickled(out, handle, depth);
}

py::object read_object(ValueReader& in, int depth) {
  if (depth > rpc::kMaxDepth + 1) throw_error(Error{ErrorCode::kProtocol, "a value of an RPC message is too deep"});
  switch (in.next()) {
    case Tag::kNone:
      return py::none();
    case Tag::kFalse:
      return py::bool_(false);
    case Tag::kTrue:
      return py::bool_(true);
    case Tag::kInt:
      return check(PyLong_FromLongLong(in.int_value()));
    case Tag::kFloat:
      return check(PyFloat_FromDouble(in.float_value()));
    case Tag::kString: {
      const std::string_view text = in.bytes_value();
      return check(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
    }
    case Tag::kBytes: {
      const std::string_view bytes = in.bytes_value();
      return check(PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
    }
    case Tag::kList:
      return read_list(in, depth);
    case Tag::kTuple:
      return check(PyList_AsTuple(read_list(in, depth).ptr()));
    case Tag::kDict:
      return read_dict(in, depth);
    case Tag::kTensor:
      return check(THPVariable_Wrap(in.tensor_value()));
    case Tag::kObject:
      return read_pickled(in, depth);
    case Tag::kAlias:
      return check(THPVariable_Wrap(in.alias_value()));
    case Tag::kRef:
      return py::handle(reinterpret_cast<PyObject*>(ref_class())).attr("_of")(PyRef(in.ref_value()));
  }
  throw_error(Error{ErrorCode::kProtocol, "a value of an RPC message has an unknown tag"});
}

}  // namespace muster::python
