// muster.Group: calls a process group's collectives from Python, without c10d's dispatcher and autograd.
//
// This uses plain CPython instead of pybind11, whose argument conversion costs more than the operation itself at a few
// bytes.
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <string_view>

#include "bindings.h"
#include "muster/torch/backend.h"
#include "muster/torch/exception.h"

namespace muster::python {
namespace {

using Tensors = ProcessGroupMuster::Tensors;

struct GroupObject {
  PyObject_HEAD;
  c10::intrusive_ptr<ProcessGroupMuster> backend;
};

ProcessGroupMuster& backend_of(PyObject* self) { return *reinterpret_cast<GroupObject*>(self)->backend; }

/// The arguments of one call, by position or name. Missing arguments and None become null.
template <size_t N>
class Arguments {
 public:
  Arguments(const char* function, const std::array<const char*, N>& names, size_t required, PyObject* const* given,
            Py_ssize_t count, PyObject* keywords) {
    if (static_cast<size_t>(count) > N) throw py::type_error(c10::str(function, "() takes at most ", N, " arguments"));
    std::copy(given, given + count, values_.begin());
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < named; ++i) take(function, names, PyTuple_GET_ITEM(keywords, i), given[count + i]);
    for (size_t i = 0; i < required; ++i) {
      if (values_[i] == nullptr) throw py::type_error(c10::str(function, "() needs the argument ", names[i]));
    }
    for (PyObject*& value : values_) {
      if (value == Py_None) value = nullptr;
    }
  }
  PyObject* operator[](size_t index) const { return values_[index]; }

 private:
  void take(const char* function, const std::array<const char*, N>& names, PyObject* name, PyObject* value) {
    for (size_t i = 0; i < N; ++i) {
      if (PyUnicode_CompareWithASCIIString(name, names[i]) != 0) continue;
      if (values_[i] != nullptr) throw py::type_error(c10::str(function, "() got the argument ", names[i], " twice"));
      values_[i] = value;
      return;
    }
    for (const auto& [old, renamed] : kRenamed) {
      if (PyUnicode_CompareWithASCIIString(name, old) != 0) continue;
      const std::string text = c10::str(function, "(): the argument ", old, " is now called ", renamed);
      if (PyErr_WarnEx(PyExc_DeprecationWarning, text.c_str(), 1) != 0) throw py::error_already_set();
      return take(function, names, py::str(renamed).ptr(), value);
    }
    throw py::type_error(c10::str(function, "() has no argument ", PyUnicode_AsUTF8(name)));
  }

  /// Old names of arguments, accepted for one release.
  static constexpr std::array<std::pair<const char*, const char*>, 2> kRenamed{{{"to", "dst"}, {"source", "src"}}};

  std::array<PyObject*, N> values_{};
};

const at::Tensor& tensor_of(PyObject* object) {
  if (object == nullptr || !THPVariable_Check(object)) {
    throw py::type_error(c10::str("expected a tensor, got ", object == nullptr ? "nothing" : Py_TYPE(object)->tp_name));
  }
  return THPVariable_Unpack(object);
}

int64_t integer_of(PyObject* object, int64_t otherwise) {
  if (object == nullptr) return otherwise;
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

std::vector<int64_t> integers_of(PyObject* object) {
  return object == nullptr ? std::vector<int64_t>() : py::cast<std::vector<int64_t>>(py::handle(object));
}

c10d::ReduceOp op_of(PyObject* object) {
  if (object == nullptr) return c10d::ReduceOp::SUM;
  if (!PyUnicode_Check(object)) {
    const py::handle op = object;
    // This check comes first, because torch accepts its enumerators as instances of ReduceOp.
    if (py::isinstance<c10d::ReduceOp::RedOpType>(op)) return py::cast<c10d::ReduceOp::RedOpType>(op);
    return py::cast<c10d::ReduceOp>(op);
  }
  constexpr std::array<std::pair<std::string_view, c10d::ReduceOp::RedOpType>, 8> kNames{{
      {"sum", c10d::ReduceOp::SUM},
      {"avg", c10d::ReduceOp::AVG},
      {"product", c10d::ReduceOp::PRODUCT},
      {"min", c10d::ReduceOp::MIN},
      {"max", c10d::ReduceOp::MAX},
      {"band", c10d::ReduceOp::BAND},
      {"bor", c10d::ReduceOp::BOR},
      {"bxor", c10d::ReduceOp::BXOR},
  }};
  const std::string_view given = PyUnicode_AsUTF8(object);
  for (const auto& [name, op] : kNames) {
    if (given == name) return op;
  }
  throw py::value_error(c10::str("\"", given,
                                 "\" is not a reduce operation; use one of sum, avg, product, min, max, band, "
                                 "bor, bxor"));
}

/// Takes a number, or a timedelta as torch.distributed does.
double seconds_of(PyObject* timeout) {
  if (PyFloat_Check(timeout) == 0 && PyObject_HasAttrString(timeout, "total_seconds") == 1)
    return py::handle(timeout).attr("total_seconds")().cast<double>();
  const double seconds = PyFloat_AsDouble(timeout);
  if (seconds == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return seconds;
}

/// Reads async_op= and timeout= (seconds), the last arguments of every call.
template <class Options, class Arguments>
Options options_of(const Arguments& arguments, size_t async) {
  Options options;
  options.asyncOp =
      arguments[async] != nullptr && arguments[async] != Py_False && PyObject_IsTrue(arguments[async]) == 1;
  if (PyObject* timeout = arguments[async + 1]) {
    const double seconds = seconds_of(timeout);
    if (!(seconds > 0)) throw py::value_error("the timeout must be positive");
    options.timeout = std::chrono::milliseconds(std::max<int64_t>(1, std::llround(seconds * 1000)));
  }
  return options;
}

/// Releases the GIL. pybind11's class for this costs more.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

/// Runs `call` without the GIL. Returns its Work, or None if it is complete.
template <class Call>
PyObject* run(Call call) {
  ProcessGroupMuster::Handle work;
  {
    const WithoutGil no_gil;
    work = call();
  }
  if (!work) Py_RETURN_NONE;
  return py::cast(std::move(work)).release().ptr();
}

/// Turns C++ exceptions into Python's.
template <class Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const ErrorException& exception) {
    raise(exception.error());
  } catch (py::error_already_set& exception) {
    exception.restore();
  } catch (const py::builtin_exception& exception) {
    exception.set_error();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

using Given = PyObject* const*;

PyObject* all_reduce(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<4> arguments("all_reduce", {"tensor", "op", "async_op", "timeout"}, 1, given, count, keywords);
    auto options = options_of<c10d::AllreduceOptions>(arguments, 2);
    options.reduceOp = op_of(arguments[1]);
    Tensors tensors{tensor_of(arguments[0])};
    return run([&] { return backend_of(self).allreduce(tensors, options); });
  });
}

PyObject* reduce(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<5> arguments("reduce", {"tensor", "root", "op", "async_op", "timeout"}, 2, given, count, keywords);
    auto options = options_of<c10d::ReduceOptions>(arguments, 3);
    options.rootRank = integer_of(arguments[1], 0);
    options.reduceOp = op_of(arguments[2]);
    Tensors tensors{tensor_of(arguments[0])};
    return run([&] { return backend_of(self).reduce(tensors, options); });
  });
}

PyObject* broadcast(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<4> arguments("broadcast", {"tensor", "root", "async_op", "timeout"}, 2, given, count, keywords);
    auto options = options_of<c10d::BroadcastOptions>(arguments, 2);
    options.rootRank = integer_of(arguments[1], 0);
    Tensors tensors{tensor_of(arguments[0])};
    return run([&] { return backend_of(self).broadcast(tensors, options); });
  });
}

PyObject* all_gather_into_tensor(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<4> arguments("all_gather_into_tensor", {"output", "input", "async_op", "timeout"}, 2, given, count,
                                 keywords);
    const auto options = options_of<c10d::AllgatherOptions>(arguments, 2);
    at::Tensor output = tensor_of(arguments[0]);
    at::Tensor input = tensor_of(arguments[1]);
    return run([&] { return backend_of(self)._allgather_base(output, input, options); });
  });
}

PyObject* reduce_scatter(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<5> arguments("reduce_scatter", {"output", "input", "op", "async_op", "timeout"}, 2, given, count,
                                 keywords);
    auto options = options_of<c10d::ReduceScatterOptions>(arguments, 3);
    options.reduceOp = op_of(arguments[2]);
    at::Tensor output = tensor_of(arguments[0]);
    at::Tensor input = tensor_of(arguments[1]);
    return run([&] { return backend_of(self)._reduce_scatter_base(output, input, options); });
  });
}

PyObject* all_to_all_single(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<6> arguments("all_to_all_single",
                                 {"output", "input", "output_splits", "input_splits", "async_op", "timeout"}, 2, given,
                                 count, keywords);
    const auto options = options_of<c10d::AllToAllOptions>(arguments, 4);
    at::Tensor output = tensor_of(arguments[0]);
    at::Tensor input = tensor_of(arguments[1]);
    std::vector<int64_t> output_splits = integers_of(arguments[2]);
    std::vector<int64_t> input_splits = integers_of(arguments[3]);
    return run([&] { return backend_of(self).alltoall_base(output, input, output_splits, input_splits, options); });
  });
}

PyObject* barrier(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<2> arguments("barrier", {"async_op", "timeout"}, 0, given, count, keywords);
    const auto options = options_of<c10d::BarrierOptions>(arguments, 0);
    return run([&] { return backend_of(self).barrier(options); });
  });
}

/// Returns a Work for `async_op`, else the result of `after` for the completed Work.
template <class Call, class After>
PyObject* message(PyObject* async, Call call, After after) {
  if (async != nullptr && PyObject_IsTrue(async) == 1) return run(call);
  ProcessGroupMuster::Handle work;
  {
    const WithoutGil no_gil;
    work = call();
    work->wait();
  }
  return after(*work);
}

PyObject* send(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<4> arguments("send", {"tensor", "dst", "tag", "async_op"}, 2, given, count, keywords);
    Tensors tensors{tensor_of(arguments[0])};
    const int dst = static_cast<int>(integer_of(arguments[1], -1));
    const int tag = static_cast<int>(integer_of(arguments[2], 0));
    return message(
        arguments[3], [&] { return backend_of(self).send(tensors, dst, tag); },
        [](c10d::Work&) -> PyObject* { Py_RETURN_NONE; });
  });
}

PyObject* recv(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<4> arguments("recv", {"tensor", "src", "tag", "async_op"}, 1, given, count, keywords);
    Tensors tensors{tensor_of(arguments[0])};
    const int src = static_cast<int>(integer_of(arguments[1], -1));
    const int tag = static_cast<int>(integer_of(arguments[2], 0));
    const bool any = arguments[1] == nullptr;
    return message(
        arguments[3],
        [&] { return any ? backend_of(self).recvAnysource(tensors, tag) : backend_of(self).recv(tensors, src, tag); },
        [&](c10d::Work& work) { return PyLong_FromLong(any ? work.sourceRank() : src); });
  });
}

PyObject* abort(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const WithoutGil no_gil;
    backend_of(self).abort();
    Py_RETURN_NONE;
  });
}

PyObject* empty(PyObject* self, Given given, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] {
    const Arguments<2> arguments("empty", {"count", "dtype"}, 2, given, count, keywords);
    const int64_t elements = integer_of(arguments[0], 0);
    const auto type = py::cast<c10::ScalarType>(py::handle(arguments[1]));
    return THPVariable_Wrap(backend_of(self).allocateTensor(elements, at::TensorOptions(type)));
  });
}

PyObject* new_group(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    PyObject* given = nullptr;
    static char name[] = "backend";
    static char* names[] = {name, nullptr};
    if (PyArg_ParseTupleAndKeywords(arguments, keywords, "O:Group", names, &given) == 0) return nullptr;
    const auto backend = py::cast<c10::intrusive_ptr<c10d::Backend>>(py::handle(given));
    auto ours = c10::dynamic_intrusive_pointer_cast<ProcessGroupMuster>(backend);
    if (!ours) {
      throw py::type_error(c10::str("muster.Group needs a process group whose CPU backend is \"muster\", not \"",
                                    backend->getBackendName(), "\": make it with init_process_group(\"muster\")"));
    }
    PyObject* self = type->tp_alloc(type, 0);
    if (self != nullptr) new (&reinterpret_cast<GroupObject*>(self)->backend) decltype(ours)(std::move(ours));
    return self;
  });
}

void free_group(PyObject* self) {
  {
    auto backend = std::move(reinterpret_cast<GroupObject*>(self)->backend);
    reinterpret_cast<GroupObject*>(self)->backend.~intrusive_ptr();
    const WithoutGil no_gil;  // the last reference waits for the group's threads, which may need the GIL
    backend.reset();
  }
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

template <auto Getter>
PyObject* get(PyObject* self, void*) {
  return guarded([&] { return py::cast(Getter(backend_of(self))).release().ptr(); });
}
int rank_of(ProcessGroupMuster& backend) { return backend.getRank(); }
int size_of_group(ProcessGroupMuster& backend) { return backend.getSize(); }
std::string name_of(ProcessGroupMuster& backend) { return backend.group().membership().name; }
double timeout_of(ProcessGroupMuster& backend) {
  return std::chrono::duration<double>(backend.group().timeout()).count();
}
uint64_t sequence_of(ProcessGroupMuster& backend) { return backend.group().sequence(); }
std::string transport_of(ProcessGroupMuster& backend) { return backend.group().transport(); }

/// `doc` begins with the signature in CPython's format, for inspect.signature() and help(): "($self,
/// ...)\n--\n\n...".
template <class Function>
PyMethodDef method(const char* name, Function function, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL | METH_KEYWORDS,
          doc};
}

}  // namespace

void bind_group(py::module_& module) {
  static std::array<PyMethodDef, 12> methods{{
      method("all_reduce", &all_reduce,
             "all_reduce($self, tensor, op='sum', async_op=False, timeout=None)\n--\n\n"
             "Combines the tensors of all ranks, in place at each rank."),
      method("reduce", &reduce,
             "reduce($self, tensor, root, op='sum', async_op=False, timeout=None)\n--\n\n"
             "Combines the tensors of all ranks, in place at the root. The tensors of the other ranks do not change."),
      method("broadcast", &broadcast,
             "broadcast($self, tensor, root, async_op=False, timeout=None)\n--\n\n"
             "Copies the root's tensor to all ranks, in place."),
      method(
          "all_gather_into_tensor", &all_gather_into_tensor,
          "all_gather_into_tensor($self, output, input, async_op=False, timeout=None)\n--\n\n"
          "Writes the inputs of all ranks to output, in rank order. output has size times as many elements as input."),
      method("reduce_scatter", &reduce_scatter,
             "reduce_scatter($self, output, input, op='sum', async_op=False, timeout=None)\n--\n\n"
             "Combines the inputs of all ranks. Each rank gets its block in output; input has size blocks."),
      method("all_to_all_single", &all_to_all_single,
             "all_to_all_single($self, output, input, output_splits=None, input_splits=None, async_op=False, "
             "timeout=None)\n--\n\n"
             "Sends one block of input to each rank, and writes the blocks that arrive to output. Splits are rows of "
             "the first "
             "dimension, by rank;\nwithout them all blocks are equal."),
      method("barrier", &barrier,
             "barrier($self, async_op=False, timeout=None)\n--\n\n"
             "Returns when all ranks have called it."),
      method(
          "send", &send,
          "send($self, tensor, dst, tag=0, async_op=False)\n--\n\n"
          "Sends to one rank, which must call recv() with the same tag. Returns when the tensor may be changed again."),
      method("recv", &recv,
             "recv($self, tensor, src=None, tag=0, async_op=False)\n--\n\n"
             "Receives from one rank, or without src from the first that sends. Returns the sender's rank."),
      method("_empty", &empty, "_empty($self, count, dtype)\n--\n\nBehind Group.empty()."),
      {"abort", &abort, METH_NOARGS,
       "abort($self)\n--\n\nAborts the group: pending and later calls raise muster.AbortedError."},
      {},
  }};
  static std::array<PyGetSetDef, 7> properties{{
      {"rank", &get<&rank_of>, nullptr, "The rank of this process in the group.", nullptr},
      {"size", &get<&size_of_group>, nullptr, "The number of ranks.", nullptr},
      {"name", &get<&name_of>, nullptr, "The group's name, as in error messages and `muster dump`.", nullptr},
      {"timeout", &get<&timeout_of>, nullptr, "The timeout of calls that name none, in seconds.", nullptr},
      {"sequence", &get<&sequence_of>, nullptr, "The number of collectives that were started.", nullptr},
      {"transport", &get<&transport_of>, nullptr, "How the ranks are linked: \"shm\", \"unix\", \"tcp\", ...", nullptr},
      {},
  }};
  static std::array<PyType_Slot, 5> slots{{
      {Py_tp_new, reinterpret_cast<void*>(&new_group)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&free_group)},
      {Py_tp_methods, methods.data()},
      {Py_tp_getset, properties.data()},
      {},
  }};
  static PyType_Spec spec{"muster._C.Group", sizeof(GroupObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                          slots.data()};
  module.attr("Group") = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
}

}  // namespace muster::python
