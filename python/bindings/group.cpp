// muster.Group: calls a process group's collectives from Python, without c10d's dispatcher and autograd.
//
// This uses plain CPython instead of pybind11, whose argument conversion costs more than the operation itself at a few
// bytes.
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <functional>
#include <string_view>

#include "bindings.h"
#include "hooks.h"
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

/// The arguments of one call as CPython passes them: `count` by position, then those whose names are `keywords`.
struct Given {
  PyObject* const* values;
  Py_ssize_t count;
  PyObject* keywords;
};

/// The arguments of one call, by position or name. Missing arguments and None become null.
template <size_t N>
class Arguments {
 public:
  Arguments(const char* function, const std::array<const char*, N>& names, size_t required, const Given& given) {
    const auto [values, count, keywords] = given;
    if (static_cast<size_t>(count) > N) throw py::type_error(c10::str(function, "() takes at most ", N, " arguments"));
    std::copy(values, values + count, values_.begin());
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < named; ++i) take(function, names, PyTuple_GET_ITEM(keywords, i), values[count + i]);
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

/// Reads async_op= and timeout= (seconds), the last arguments of every collective.
template <class Options, size_t N>
Options options_of(const Arguments<N>& arguments) {
  Options options;
  PyObject* const async = arguments[N - 2];
  options.asyncOp = async != nullptr && async != Py_False && PyObject_IsTrue(async) == 1;
  if (PyObject* timeout = arguments[N - 1]) {
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
  } catch (const ArgumentException& exception) {
    raise(exception);
  } catch (py::error_already_set& exception) {
    exception.restore();
  } catch (const py::builtin_exception& exception) {
    exception.set_error();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
  return nullptr;
}

PyObject* all_reduce(ProcessGroupMuster& group, const Given& given) {
  const Arguments<4> arguments("all_reduce", {"tensor", "op", "async_op", "timeout"}, 1, given);
  auto options = options_of<c10d::AllreduceOptions>(arguments);
  options.reduceOp = op_of(arguments[1]);
  Tensors tensors{tensor_of(arguments[0])};
  return run([&] { return group.allreduce(tensors, options); });
}

PyObject* reduce(ProcessGroupMuster& group, const Given& given) {
  const Arguments<5> arguments("reduce", {"tensor", "root", "op", "async_op", "timeout"}, 2, given);
  auto options = options_of<c10d::ReduceOptions>(arguments);
  options.rootRank = integer_of(arguments[1], 0);
  options.reduceOp = op_of(arguments[2]);
  Tensors tensors{tensor_of(arguments[0])};
  return run([&] { return group.reduce(tensors, options); });
}

PyObject* broadcast(ProcessGroupMuster& group, const Given& given) {
  const Arguments<4> arguments("broadcast", {"tensor", "root", "async_op", "timeout"}, 2, given);
  auto options = options_of<c10d::BroadcastOptions>(arguments);
  options.rootRank = integer_of(arguments[1], 0);
  Tensors tensors{tensor_of(arguments[0])};
  return run([&] { return group.broadcast(tensors, options); });
}

PyObject* all_gather_into_tensor(ProcessGroupMuster& group, const Given& given) {
  const Arguments<4> arguments("all_gather_into_tensor", {"output", "input", "async_op", "timeout"}, 2, given);
  const auto options = options_of<c10d::AllgatherOptions>(arguments);
  at::Tensor output = tensor_of(arguments[0]);
  at::Tensor input = tensor_of(arguments[1]);
  return run([&] { return group._allgather_base(output, input, options); });
}

PyObject* reduce_scatter(ProcessGroupMuster& group, const Given& given) {
  const Arguments<5> arguments("reduce_scatter", {"output", "input", "op", "async_op", "timeout"}, 2, given);
  auto options = options_of<c10d::ReduceScatterOptions>(arguments);
  options.reduceOp = op_of(arguments[2]);
  at::Tensor output = tensor_of(arguments[0]);
  at::Tensor input = tensor_of(arguments[1]);
  return run([&] { return group._reduce_scatter_base(output, input, options); });
}

PyObject* all_to_all_single(ProcessGroupMuster& group, const Given& given) {
  const Arguments<6> arguments("all_to_all_single",
                               {"output", "input", "output_splits", "input_splits", "async_op", "timeout"}, 2, given);
  const auto options = options_of<c10d::AllToAllOptions>(arguments);
  at::Tensor output = tensor_of(arguments[0]);
  at::Tensor input = tensor_of(arguments[1]);
  std::vector<int64_t> output_splits = integers_of(arguments[2]);
  std::vector<int64_t> input_splits = integers_of(arguments[3]);
  return run([&] { return group.alltoall_base(output, input, output_splits, input_splits, options); });
}

PyObject* barrier(ProcessGroupMuster& group, const Given& given) {
  const Arguments<2> arguments("barrier", {"async_op", "timeout"}, 0, given);
  const auto options = options_of<c10d::BarrierOptions>(arguments);
  return run([&] { return group.barrier(options); });
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

PyObject* send(ProcessGroupMuster& group, const Given& given) {
  const Arguments<4> arguments("send", {"tensor", "dst", "tag", "async_op"}, 2, given);
  Tensors tensors{tensor_of(arguments[0])};
  const int dst = static_cast<int>(integer_of(arguments[1], -1));
  const int tag = static_cast<int>(integer_of(arguments[2], 0));
  return message(
      arguments[3], [&] { return group.send(tensors, dst, tag); }, [](c10d::Work&) -> PyObject* { Py_RETURN_NONE; });
}

PyObject* recv(ProcessGroupMuster& group, const Given& given) {
  const Arguments<4> arguments("recv", {"tensor", "src", "tag", "async_op"}, 1, given);
  Tensors tensors{tensor_of(arguments[0])};
  const int src = static_cast<int>(integer_of(arguments[1], -1));
  const int tag = static_cast<int>(integer_of(arguments[2], 0));
  const bool any = arguments[1] == nullptr;
  return message(
      arguments[3], [&] { return any ? group.recvAnysource(tensors, tag) : group.recv(tensors, src, tag); },
      [&](c10d::Work& work) { return PyLong_FromLong(any ? work.sourceRank() : src); });
}

PyObject* empty(ProcessGroupMuster& group, const Given& given) {
  const Arguments<2> arguments("empty", {"count", "dtype"}, 2, given);
  const int64_t elements = integer_of(arguments[0], 0);
  const auto type = py::cast<c10::ScalarType>(py::handle(arguments[1]));
  return THPVariable_Wrap(group.allocateTensor(elements, at::TensorOptions(type)));
}

PyObject* abort(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    const WithoutGil no_gil;
    backend_of(self).abort();
    Py_RETURN_NONE;
  });
}

PyObject* new_group(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    PyObject* given = nullptr;
    static char name[] = "backend";
    static char* names[] = {name, nullptr};
    if (PyArg_ParseTupleAndKeywords(arguments, keywords, "O:Group", names, &given) == 0) return nullptr;
    auto ours = muster_backend(py::cast<c10::intrusive_ptr<c10d::Backend>>(py::handle(given)), "muster.Group");
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

template <auto kGetter>
PyObject* get(PyObject* self, void*) {
  return guarded([&] { return py::cast(std::invoke(kGetter, backend_of(self))).release().ptr(); });
}
std::string name_of(ProcessGroupMuster& backend) { return backend.group().membership().name; }
double timeout_of(ProcessGroupMuster& backend) {
  return std::chrono::duration<double>(backend.group().timeout()).count();
}
uint64_t sequence_of(ProcessGroupMuster& backend) { return backend.group().sequence(); }
std::string transport_of(ProcessGroupMuster& backend) { return backend.group().transport(); }

using Function = PyObject* (*)(ProcessGroupMuster&, const Given&);

template <Function kFunction>
PyObject* invoke(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* keywords) {
  return guarded([&] { return kFunction(backend_of(self), {values, count, keywords}); });
}

/// `doc` begins with the name and the signature in CPython's format, for inspect.signature() and help():
/// "name($self, ...)\n--\n\n...".
template <Function kFunction>
PyMethodDef method(const char* doc) {
  static const auto& name = *new std::string(doc, std::strchr(doc, '('));  // Python may read it until the process ends
  return {name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&invoke<kFunction>)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

}  // namespace

void bind_group(py::module_& module) {
  static std::array<PyMethodDef, 12> methods{{
      method<&all_reduce>("all_reduce($self, tensor, op='sum', async_op=False, timeout=None)\n--\n\n"
                          "Combines the tensors of all ranks, in place at each rank."),
      method<&reduce>(
          "reduce($self, tensor, root, op='sum', async_op=False, timeout=None)\n--\n\n"
          "Combines the tensors of all ranks, in place at the root. The tensors of the other ranks do not change."),
      method<&broadcast>("broadcast($self, tensor, root, async_op=False, timeout=None)\n--\n\n"
                         "Copies the root's tensor to all ranks, in place."),
      method<&all_gather_into_tensor>(
          "all_gather_into_tensor($self, output, input, async_op=False, timeout=None)\n--\n\n"
          "Writes the inputs of all ranks to output, in rank order. output has size times as many elements as input."),
      method<&reduce_scatter>(
          "reduce_scatter($self, output, input, op='sum', async_op=False, timeout=None)\n--\n\n"
          "Combines the inputs of all ranks. Each rank gets its block in output; input has size blocks."),
      method<&all_to_all_single>(
          "all_to_all_single($self, output, input, output_splits=None, input_splits=None, async_op=False, "
          "timeout=None)\n--\n\n"
          "Sends one block of input to each rank, and writes the blocks that arrive to output. Splits are rows of "
          "the first dimension, by rank;\nwithout them all blocks are equal."),
      method<&barrier>("barrier($self, async_op=False, timeout=None)\n--\n\n"
                       "Returns when all ranks have called it."),
      method<&send>(
          "send($self, tensor, dst, tag=0, async_op=False)\n--\n\n"
          "Sends to one rank, which must call recv() with the same tag. Returns when the tensor may be changed again."),
      method<&recv>("recv($self, tensor, src=None, tag=0, async_op=False)\n--\n\n"
                    "Receives from one rank, or without src from the first that sends. Returns the sender's rank."),
      method<&empty>("_empty($self, count, dtype)\n--\n\nBehind Group.empty()."),
      {"abort", &abort, METH_NOARGS,
       "abort($self)\n--\n\nAborts the group: pending and later calls raise muster.AbortedError."},
      {},
  }};
  static std::array<PyGetSetDef, 7> properties{{
      {"rank", &get<&ProcessGroupMuster::getRank>, nullptr, "The rank of this process in the group.", nullptr},
      {"size", &get<&ProcessGroupMuster::getSize>, nullptr, "The number of ranks.", nullptr},
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
