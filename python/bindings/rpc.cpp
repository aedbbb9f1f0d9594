// The native half of muster.rpc: an agent, its calls, and the calls that it serves with Python functions.
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "muster/rpc/endpoint.h"
#include "muster/torch/exception.h"
#include "muster/torch/rpc/remote_error.h"
#include "muster/torch/store.h"
#include "rpc_values.h"

namespace muster::python {
namespace {

using rpc::Agent;
using rpc::CallResult;
using rpc::Message;

/// How often a wait looks for signals, such as that of Ctrl-C.
constexpr Duration kSignalInterval = 100ms;

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

/// The GIL for a thread of the agent. The thread keeps its Python state between calls, because making one costs more
/// than a small call.
class Gil {
 public:
  Gil() { PyEval_RestoreThread(state().thread); }
  ~Gil() { state().thread = PyEval_SaveThread(); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  struct State {
    State() : before(PyGILState_Ensure()), thread(PyEval_SaveThread()) {}
    ~State() {
      if (Py_IsInitialized() == 0 || is_finalizing()) return;
      PyEval_RestoreThread(thread);
      PyGILState_Release(before);
    }
    State(const State&) = delete;
    PyGILState_STATE before;
    PyThreadState* thread;
  };
  static State& state() {
    thread_local State state;
    return state;
  }
};

/// Releases a reference of Python wherever the last copy is dropped.
struct Releaser {
  void operator()(PyObject* object) const {
    if (Py_IsInitialized() == 0 || is_finalizing()) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(object);
  }
};
std::shared_ptr<PyObject> shared(py::object object) { return {object.release().ptr(), Releaser()}; }

py::module_ serving() {
  static auto& module = *new py::module_(py::module_::import("muster.rpc._serving"));
  return module;
}

/// The exception that Python has raised, for the caller.
rpc::CallError call_error(const py::object& exception) {
  const auto [type, message, traceback] =
      serving().attr("describe")(exception).cast<std::tuple<std::string, std::string, std::string>>();
  return {{ErrorCode::kInternal, message}, type, traceback};
}

/// The exception with its traceback, which CPython 3.11 keeps apart from it.
py::object exception_of(const py::error_already_set& error) {
  py::object exception = error.value();
  if (error.trace()) PyException_SetTraceback(exception.ptr(), error.trace().ptr());
  return exception;
}

/// Sends the result of a call. For functions that reply later.
class PyResponder {
 public:
  explicit PyResponder(rpc::Responder responder) : responder_(std::move(responder)) {}
  ~PyResponder() {
    const py::gil_scoped_release no_gil;  // it may hold the last reference to the agent
    responder_.reset();
  }
  PyResponder(const PyResponder&) = delete;

  void reply(const py::object& result) {
    std::optional<Message> message;
    try {
      message = to_message(result);
    } catch (py::error_already_set& error) {
      return fail(exception_of(error));
    }
    const py::gil_scoped_release no_gil;
    responder_->reply(std::move(*message));
  }
  void fail(const py::object& exception) {
    rpc::CallError why = call_error(exception);
    const py::gil_scoped_release no_gil;
    responder_->fail(std::move(why));
  }

 private:
  std::optional<rpc::Responder> responder_;
};

/// Runs muster.rpc._serving.run(), which returns the responder itself if the function replies later.
void serve(rpc::Request request, rpc::Responder responder) {
  if (is_finalizing()) return;
  const Gil gil;
  const py::object later = py::cast(std::make_shared<PyResponder>(std::move(responder)));
  auto& now = later.cast<PyResponder&>();
  try {
    const py::object arguments = from_message(request.arguments);
    static const auto& run = *new py::object(serving().attr("run"));
    const py::object result = run(request.function, arguments, request.from.name, later);
    if (!result.is(later)) now.reply(result);
  } catch (py::error_already_set& error) {
    now.fail(exception_of(error));
  } catch (const ErrorException& error) {
    now.fail(py::module_::import("muster.errors").attr("ProtocolError")(error.what()));
  } catch (const std::exception& error) {
    now.fail(py::module_::import("builtins").attr("RuntimeError")(error.what()));
  }
}

/// The error of a call as Python's.
[[noreturn]] void raise_call_error(const rpc::CallError& error) {
  if (error.type.empty()) throw_error(error.error);
  const py::object exception =
      serving().attr("rebuild")(error.type, error.error.message, error.error.context, error.traceback);
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
  throw py::error_already_set();
}

/// A call whose result is pending.
class PyCall {
 public:
  explicit PyCall(rpc::Future future) : future_(std::move(future)) {}
  ~PyCall() {
    const py::gil_scoped_release no_gil;  // it may hold the last reference to the agent
    future_.reset();
  }
  PyCall(PyCall&&) = default;

  bool done() const { return future_->done(); }

  py::object wait() {
    while (!future_->done()) {
      {
        const py::gil_scoped_release no_gil;
        future_->wait_until(Deadline::after(kSignalInterval));
      }
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    const CallResult& result = future_->wait();
    if (!result) raise_call_error(result.error());
    if (!value_) value_ = result->head.empty() ? py::none() : from_message(*result);  // empty: it was a one-way call
    return value_;
  }

  void then(py::object callback) {
    const py::gil_scoped_release no_gil;
    future_->then([callback = shared(std::move(callback))](const CallResult&) {
      if (is_finalizing()) return;
      const py::gil_scoped_acquire gil;
      try {
        py::handle(callback.get())();
      } catch (py::error_already_set& error) {
        error.restore();
        PyErr_WriteUnraisable(callback.get());
      }
    });
  }

  void cancel() const {
    const py::gil_scoped_release no_gil;
    future_->cancel();
  }

 private:
  std::optional<rpc::Future> future_;
  py::object value_;  ///< the result, once it was read
};

/// An agent for Python. Its end waits for threads that may need the GIL.
class PyAgent {
 public:
  explicit PyAgent(std::shared_ptr<Agent> agent) : agent_(std::move(agent)) {}
  ~PyAgent() {
    const py::gil_scoped_release no_gil;
    agent_.reset();
  }
  PyAgent(const PyAgent&) = delete;

  std::string name() const { return agent_->self().name; }
  int id() const { return agent_->self().id; }

  PyCall call(const std::string& to, const std::string& function, const py::object& arguments, double timeout,
              bool one_way, bool idempotent) {
    Message message = to_message(arguments);
    rpc::CallOptions options;
    options.timeout = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(timeout));
    options.one_way = one_way;
    options.idempotent = idempotent;
    const py::gil_scoped_release no_gil;
    return PyCall(agent_->call(to, function, std::move(message), options));
  }

  std::vector<std::pair<std::string, int>> workers(double timeout) {
    std::vector<std::pair<std::string, int>> workers;
    for (auto& worker : value_or_throw(agent_->workers(after(timeout)))) workers.emplace_back(worker.name, worker.id);
    return workers;
  }
  void barrier(const std::string& name, int count, double timeout) {
    value_or_throw(agent_->barrier(name, count, after(timeout)));
  }
  void shutdown(double timeout) { value_or_throw(agent_->shutdown(after(timeout))); }

 private:
  static Deadline after(double seconds) {
    return Deadline::after(std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds)));
  }
  std::shared_ptr<Agent> agent_;
};

std::unique_ptr<PyAgent> join(const std::optional<c10::intrusive_ptr<c10d::Store>>& store, const std::string& name,
                              const std::string& group, const std::optional<std::string>& transports,
                              const std::optional<std::string>& interface, int max_handlers, double timeout) {
  rpc::EndpointOptions options;
  options.name = name;
  options.group = group;
  if (transports) options.transports = *transports;
  if (interface) options.interface = *interface;
  options.max_handlers = max_handlers;
  options.timeout = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(timeout));
  auto agent = value_or_throw(store ? rpc::start_endpoint(store_over_c10d(*store), std::move(options))
                                    : rpc::join_job(std::move(options)));
  value_or_throw(agent->add_fallback(serve));
  return std::make_unique<PyAgent>(std::move(agent));
}

}  // namespace

void bind_rpc(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<PyAgent>(module, "RpcAgent")
      .def_property_readonly("name", &PyAgent::name)
      .def_property_readonly("id", &PyAgent::id)
      .def("call", &PyAgent::call)
      .def("workers", &PyAgent::workers, no_gil)
      .def("barrier", &PyAgent::barrier, no_gil)
      .def("shutdown", &PyAgent::shutdown, no_gil);
  py::class_<PyCall>(module, "RpcCall")
      .def("done", &PyCall::done)
      .def("wait", &PyCall::wait)
      .def("then", &PyCall::then)
      .def("cancel", &PyCall::cancel);
  py::class_<PyResponder, std::shared_ptr<PyResponder>>(module, "RpcResponder")
      .def("reply", &PyResponder::reply)
      .def("fail", &PyResponder::fail);
  module.def("rpc_join", &join, py::arg("store"), py::arg("name"), py::arg("group"), py::arg("transports"),
             py::arg("interface"), py::arg("max_handlers"), py::arg("timeout"), no_gil);
}

}  // namespace muster::python
