// The native half of muster.rpc: an agent, its calls, and the calls that it serves with Python functions.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <map>
#include <optional>
#include <string>

#include "bindings.h"
#include "gil.h"
#include "muster/rpc/endpoint.h"
#include "muster/torch/exception.h"
#include "muster/torch/rpc/autograd.h"
#include "muster/torch/rpc/operators.h"
#include "muster/torch/rpc/process_group_relay.h"
#include "muster/torch/rpc/references.h"
#include "muster/torch/rpc/remote_error.h"
#include "muster/torch/store.h"
#include "rpc_values.h"

namespace muster::python {
namespace {

using rpc::Agent;
using rpc::Autograd;
using rpc::CallResult;
using rpc::ContextPtr;
using rpc::Message;
using rpc::RefService;
using rpc::ValueReader;
using rpc::ValueWriter;

py::object read_message(const Message& message, RefService* refs, int sender, const ContextPtr& context) {
  ValueReader in(message, refs, sender, context);
  py::object object = read_object(in);
  in.finish();
  return object;
}

/// How often a wait looks for signals, such as that of Ctrl-C.
constexpr Duration kSignalInterval = 100ms;

py::module_ serving() {
  return once<py::module_>([] { return py::module_::import("muster.rpc._serving"); });
}

/// The exception that Python has raised, for the caller. It throws nothing, because handlers use it.
rpc::CallError call_error(const py::object& exception) {
  try {
    const auto [type, message, traceback] =
        serving().attr("describe")(exception).cast<std::tuple<std::string, std::string, std::string>>();
    return {{ErrorCode::kInternal, message}, type, traceback};
  } catch (const std::exception&) {  // of the exception's own __str__()
    return {{ErrorCode::kInternal, "an exception without a message"}, Py_TYPE(exception.ptr())->tp_name, {}};
  }
}

/// The exception with its traceback, which CPython 3.11 keeps apart from it.
py::object exception_of(const py::error_already_set& error) {
  py::object exception = error.value();
  if (error.trace()) PyException_SetTraceback(exception.ptr(), error.trace().ptr());
  return exception;
}

/// The exception that is being handled, for the caller. It may come from Python: a node of torch's graph, or an
/// operator.
rpc::CallError torch_error() {
  try {
    throw;
  } catch (const python_error& thrown) {
    const py::gil_scoped_acquire gil;
    python_error copy(thrown);
    copy.restore();
    return call_error(exception_of(py::error_already_set()));
  } catch (const py::error_already_set& thrown) {
    const py::gil_scoped_acquire gil;
    return call_error(exception_of(thrown));
  } catch (const ArgumentException& thrown) {
    return {{ErrorCode::kInternal, thrown.what_without_backtrace()}, "muster.errors:ArgumentError", {}};
  } catch (...) {
    return rpc::current_call_error();
  }
}

/// Sends the result of a call. For functions that reply later.
class PyResponder {
 public:
  PyResponder(std::shared_ptr<RefService> refs, ContextPtr context, std::string receiver, rpc::Responder responder)
      : refs_(std::move(refs)),
        context_(std::move(context)),
        receiver_(std::move(receiver)),
        responder_(std::make_shared<rpc::Responder>(std::move(responder))) {}
  ~PyResponder() {
    const py::gil_scoped_release no_gil;  // these may be the last references
    responder_.reset();
    refs_.reset();
    context_.reset();
  }
  PyResponder(const PyResponder&) = delete;

  void reply(const py::object& result) {
    ValueWriter out(context_);
    try {
      write_object(out, result);
    } catch (py::error_already_set& error) {
      return fail(exception_of(error));
    } catch (const std::exception& error) {
      return fail(py::module_::import("builtins").attr("RuntimeError")(error.what()));
    }
    const py::gil_scoped_release no_gil;
    rpc::reply_with_refs(*refs_, responder_, receiver_, std::move(out));
  }
  void fail(const py::object& exception) {
    rpc::CallError why = call_error(exception);
    const py::gil_scoped_release no_gil;
    responder_->fail(std::move(why));
  }

 private:
  std::shared_ptr<RefService> refs_;
  ContextPtr context_;
  const std::string receiver_;
  std::shared_ptr<rpc::Responder> responder_;
};

/// Runs muster.rpc._serving.run(), which returns the responder itself if the function replies later.
void serve(const std::shared_ptr<RefService>& refs, Autograd& contexts, const rpc::Request& request,
           rpc::Responder responder) {
  if (is_finalizing()) return;
  ContextPtr context;
  try {
    context = contexts.context_of(request.arguments);
  } catch (...) {
    return responder.fail(rpc::current_call_error());
  }
  const Gil gil;
  const py::object later =
      py::cast(std::make_shared<PyResponder>(refs, context, request.from.name, std::move(responder)));
  auto& now = later.cast<PyResponder&>();
  try {
    const py::object arguments = read_message(request.arguments, refs.get(), request.from.id, context);
    const auto& run = once<py::object>([] { return serving().attr("run"); });
    const py::object result = run(request.function, arguments, std::pair(request.from.name, request.from.id), later,
                                  context ? context_id(*context) : 0);
    if (!result.is(later)) now.reply(result);
  } catch (py::error_already_set& error) {
    now.fail(exception_of(error));
  } catch (const ErrorException& error) {
    now.fail(py::module_::import("muster.errors").attr("ProtocolError")(error.what()));
  } catch (const std::exception& error) {
    now.fail(py::module_::import("builtins").attr("RuntimeError")(error.what()));
  }
}

/// A value that the owner of a reference keeps.
class PyValue final : public rpc::WritableValue {
 public:
  explicit PyValue(py::object object) : object_(shared(std::move(object))) {}
  /// Throws C++ exceptions only, because its callers know no Python.
  void write(ValueWriter& out) const override {
    const py::gil_scoped_acquire gil;
    try {
      write_object(out, object_.get());
    } catch (const py::error_already_set& error) {
      throw rpc::RemoteException(call_error(exception_of(error)));
    }
  }
  py::object object() const { return py::reinterpret_borrow<py::object>(object_.get()); }

 private:
  const std::shared_ptr<PyObject> object_;
};

/// Text of another worker, which may not be UTF-8.
py::str text_of(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

/// Raises the error of a call as an exception of Python.
[[noreturn]] void raise_call_error(const rpc::CallError& error) {
  if (error.type.empty()) throw_error(error.error);
  const py::object exception = serving().attr("rebuild")(text_of(error.type), text_of(error.error.message),
                                                         error.error.context, text_of(error.traceback));
  PyErr_SetObject(py::type::handle_of(exception).ptr(), exception.ptr());
  throw py::error_already_set();
}

/// A call whose result is pending.
class PyCall {
 public:
  PyCall(rpc::Future future, std::shared_ptr<RefService> refs, ContextPtr context)
      : future_(std::move(future)), refs_(std::move(refs)), context_(std::move(context)) {}
  ~PyCall() {
    if (!refs_) return;                   // moved from
    const py::gil_scoped_release no_gil;  // these may be the last references
    future_.reset();
    refs_.reset();
    context_.reset();
  }
  PyCall(PyCall&& other) noexcept
      : future_(std::exchange(other.future_, std::nullopt)),
        refs_(std::move(other.refs_)),
        context_(std::move(other.context_)),
        value_(std::move(other.value_)) {}

  bool done() const { return future_->done(); }

  bool succeeded() const { return done() && future_->wait().has_value(); }

  /// False if the call has not ended at the deadline.
  bool wait_until(const Deadline& deadline) const {
    while (!future_->done() && !deadline.passed()) {
      {
        const py::gil_scoped_release no_gil;
        future_->wait_until(Deadline::after(std::min(kSignalInterval, deadline.left())));
      }
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    return future_->done();
  }

  py::object wait() {
    wait_until(Deadline::never());
    const CallResult& result = future_->wait();
    if (!result) raise_call_error(result.error());
    // A call in one direction has no result.
    if (!value_) {
      value_ = result->head.empty() ? py::none() : read_message(*result, refs_.get(), RefService::kReplied, context_);
    }
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
  std::shared_ptr<RefService> refs_;
  ContextPtr context_;  ///< of distributed autograd, or null
  py::object value_;    ///< the result, once it was read
};

/// An agent for Python, and its references. Its end waits for threads that may need the GIL.
class PyAgent {
 public:
  PyAgent(std::shared_ptr<Agent> agent, std::shared_ptr<RefService> refs, std::shared_ptr<Autograd> autograd)
      : agent_(std::move(agent)), refs_(std::move(refs)), autograd_(std::move(autograd)) {}
  ~PyAgent() {
    const py::gil_scoped_release no_gil;
    autograd_->stop();
    autograd_.reset();
    refs_->stop();
    refs_.reset();
    agent_.reset();
  }
  PyAgent(const PyAgent&) = delete;

  std::string name() const { return agent_->self().name; }
  int id() const { return agent_->self().id; }

  /// `context`: of distributed autograd; 0 is none. `keep`: a reference that is kept until the call has ended.
  PyCall call(const std::string& to, const std::string& function, const py::object& arguments, double timeout,
              bool one_way, bool idempotent, int64_t context, const PyRef* keep) {
    ValueWriter out(find_context(context));
    write_object(out, arguments);
    const rpc::CallOptions options{.timeout = duration(timeout), .idempotent = idempotent, .one_way = one_way};
    const py::gil_scoped_release no_gil;
    ContextPtr recorded = out.context();
    rpc::Future future = rpc::call_with_refs(*refs_, to, function, std::move(out), options);
    if (keep != nullptr) future.then([ref = keep->ref](const CallResult&) {});
    return {std::move(future), refs_, std::move(recorded)};
  }

  PyRef new_ref(const std::string& owner) { return PyRef(refs_->create(owner)); }
  PyAlias alias(const at::Tensor& tensor) { return PyAlias(rpc::Alias(*refs_, tensor)); }
  void accept_ref(int creator, uint64_t number, const std::pair<std::string, int>& by) {
    refs_->accept({creator, number}, {by.first, by.second});
  }
  void set_ref(int creator, uint64_t number, py::object value) {
    auto held = std::make_shared<PyValue>(std::move(value));
    const py::gil_scoped_release no_gil;
    refs_->set_value({creator, number}, std::move(held));
  }
  void fail_ref(int creator, uint64_t number, const py::object& exception) {
    auto failed = std::make_shared<rpc::FailedValue>(call_error(exception));
    const py::gil_scoped_release no_gil;
    refs_->set_value({creator, number}, std::move(failed));
  }
  PyCall fetch(const PyRef& ref, double timeout, int64_t context_id) {
    const py::gil_scoped_release no_gil;
    ContextPtr context = find_context(context_id);
    rpc::Future future = rpc::fetch(*ref.ref, {.timeout = duration(timeout)}, context);
    return {std::move(future), refs_, std::move(context)};
  }
  PyCall wait_for_value(const PyRef& ref, double timeout) {
    const py::gil_scoped_release no_gil;
    return {rpc::wait_for_value(*ref.ref, {.timeout = duration(timeout)}), refs_, nullptr};
  }
  /// None if there is no value yet, else a tuple of it.
  std::optional<py::tuple> local_value(const PyRef& ref) {
    const auto value = value_or_throw(refs_->value(ref.ref->id()));
    if (!value) return std::nullopt;
    if (const auto* failed = dynamic_cast<const rpc::FailedValue*>(value.get())) raise_call_error(failed->why);
    const auto* object = dynamic_cast<const PyValue*>(value.get());
    if (object == nullptr) throw py::type_error("the value of this reference is a C++ object");
    return py::make_tuple(object->object());
  }
  std::pair<size_t, size_t> ref_counts() const { return refs_->counts(); }

  std::vector<std::pair<std::string, int>> workers(double timeout) {
    std::vector<std::pair<std::string, int>> workers;
    for (auto& worker : value_or_throw(agent_->workers(Deadline::after(duration(timeout))))) {
      workers.emplace_back(worker.name, worker.id);
    }
    return workers;
  }
  void barrier(const std::string& name, int count, double timeout) {
    value_or_throw(agent_->barrier(name, count, Deadline::after(duration(timeout))));
  }
  void wait_for_calls(double timeout) { value_or_throw(agent_->wait_for_calls(Deadline::after(duration(timeout)))); }
  int64_t new_context() { return context_id(*autograd_->create()); }
  void end_context(int64_t id) {
    if (const ContextPtr context = find_context(id)) autograd_->release(context);
  }
  size_t context_count() const { return autograd_->count(); }
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients(int64_t id, bool must_exist) const {
    if (!must_exist && !autograd_->contains(id)) return {};
    return rpc::gradients_of(*autograd_->find(id));
  }
  void backward(int64_t id, const std::vector<at::Tensor>& roots, bool retain_graph, double timeout) {
    try {
      const auto pass = autograd_->begin_backward(autograd_->find(id), roots, {retain_graph, duration(timeout)});
      while (!rpc::wait_for_pass(*pass, Deadline::after(kSignalInterval))) check_signals(*pass);
    } catch (const rpc::RemoteException& error) {
      const py::gil_scoped_acquire gil;
      raise_call_error(error.call_error());
    } catch (const python_error& thrown) {
      const py::gil_scoped_acquire gil;
      python_error copy(thrown);
      copy.restore();
      throw py::error_already_set();
    }
  }

  void shutdown(double timeout) {
    const auto ended = agent_->shutdown(Deadline::after(duration(timeout)));
    autograd_->stop();
    refs_->stop();
    value_or_throw(ended);
  }

  static Duration duration(double seconds) {
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
  }

 private:
  ContextPtr find_context(int64_t id) const { return id == 0 ? nullptr : autograd_->find(id); }
  static void check_signals(rpc::PassRunner& pass) {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return;
    rpc::abort_pass(pass, "the program was interrupted");
    throw py::error_already_set();
  }

  std::shared_ptr<Agent> agent_;
  std::shared_ptr<RefService> refs_;
  std::shared_ptr<Autograd> autograd_;
};

std::unique_ptr<PyAgent> join(rpc::EndpointOptions options, const std::optional<c10::intrusive_ptr<c10d::Store>>& store,
                              const std::optional<c10::intrusive_ptr<c10d::ProcessGroup>>& process_group, double lease,
                              const std::map<std::string, std::string>& operators) {
  if (process_group) options.relay = value_or_throw(rpc::relay_over(*process_group));
  std::shared_ptr<RefService> refs;
  std::shared_ptr<Autograd> autograd;
  options.setup = [&](rpc::Agent& agent) -> Result<> {
    MUSTER_ASSIGN(refs, RefService::start(agent.shared_from_this(), {.lease = PyAgent::duration(lease)}));
    MUSTER_ASSIGN(autograd, Autograd::start(agent.shared_from_this(), torch_error));
    MUSTER_TRY(rpc::add_fetch(refs, autograd));
    for (const auto& [function, name] : operators) {
      MUSTER_TRY(rpc::add_operator(refs, autograd, function, name, torch_error));
    }
    return agent.add_fallback(
        [weak_refs = std::weak_ptr(refs), weak_autograd = std::weak_ptr(autograd)](const rpc::Request& request,
                                                                                   rpc::Responder responder) {
          const auto alive = weak_refs.lock();
          const auto contexts = weak_autograd.lock();
          if (alive && contexts) serve(alive, *contexts, request, std::move(responder));
        },
        {.serial = true});
  };
  auto agent = value_or_throw(store ? rpc::start_endpoint(store_over_c10d(*store), std::move(options))
                                    : rpc::join_job(std::move(options)));
  return std::make_unique<PyAgent>(std::move(agent), std::move(refs), std::move(autograd));
}

}  // namespace

void bind_rpc(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<PyRef>(module, "RpcRef")
      .def_property_readonly("owner", [](const PyRef& ref) { return ref.ref->owner(); })
      .def_property_readonly("is_owner", [](const PyRef& ref) { return ref.ref->is_owner(); })
      .def_property_readonly("id",
                             [](const PyRef& ref) { return std::pair(ref.ref->id().creator, ref.ref->id().number); });
  py::class_<PyAlias>(module, "RpcAlias").def_property_readonly("tensor", [](const PyAlias& alias) {
    return alias.alias.tensor();
  });
  module.def(
      "rpc_empty_shared",
      [](const std::vector<int64_t>& sizes, c10::ScalarType dtype) { return rpc::empty_shared(sizes, dtype); },
      py::arg("sizes"), py::arg("dtype"));
  py::class_<PyAgent>(module, "RpcAgent")
      .def_property_readonly("name", &PyAgent::name)
      .def_property_readonly("id", &PyAgent::id)
      .def("call", &PyAgent::call, py::arg("to"), py::arg("function"), py::arg("arguments"), py::arg("timeout"),
           py::arg("one_way"), py::arg("idempotent"), py::arg("context"), py::arg("keep") = nullptr)
      .def("new_ref", &PyAgent::new_ref)
      .def("alias", &PyAgent::alias)
      .def("accept_ref", &PyAgent::accept_ref)
      .def("set_ref", &PyAgent::set_ref)
      .def("fail_ref", &PyAgent::fail_ref)
      .def("fetch", &PyAgent::fetch)
      .def("wait_for_value", &PyAgent::wait_for_value)
      .def("local_value", &PyAgent::local_value)
      .def("ref_counts", &PyAgent::ref_counts)
      .def("new_context", &PyAgent::new_context, no_gil)
      .def("end_context", &PyAgent::end_context, no_gil)
      .def("context_count", &PyAgent::context_count, no_gil)
      .def("gradients", &PyAgent::gradients, no_gil)
      .def("backward", &PyAgent::backward, py::arg("context"), py::arg("roots"), py::arg("retain_graph"),
           py::arg("timeout"), no_gil)
      .def("workers", &PyAgent::workers, no_gil)
      .def("barrier", &PyAgent::barrier, no_gil)
      .def("wait_for_calls", &PyAgent::wait_for_calls, no_gil)
      .def("shutdown", &PyAgent::shutdown, no_gil);
  py::class_<PyCall>(module, "RpcCall")
      .def("done", &PyCall::done)
      .def("wait", &PyCall::wait)
      .def("succeeded", &PyCall::succeeded)
      .def("wait_for", [](const PyCall& call,
                          double seconds) { return call.wait_until(Deadline::after(PyAgent::duration(seconds))); })
      .def("then", &PyCall::then)
      .def("cancel", &PyCall::cancel);
  py::class_<PyResponder, std::shared_ptr<PyResponder>>(module, "RpcResponder")
      .def("reply", &PyResponder::reply)
      .def("fail", &PyResponder::fail);
  using rpc::EndpointOptions;
  py::class_<EndpointOptions>(module, "RpcOptions")
      .def(py::init<>())
      .def_readwrite("name", &EndpointOptions::name)
      .def_readwrite("group", &EndpointOptions::group)
      .def_readwrite("transports", &EndpointOptions::transports)
      .def_readwrite("interface", &EndpointOptions::interface)
      .def_readwrite("tcp_streams", &EndpointOptions::tcp_streams)
      .def_readwrite("max_handlers", &EndpointOptions::max_handlers)
      .def_readwrite("max_message_bytes", &EndpointOptions::max_message_bytes)
      .def_readwrite("max_queued_calls", &EndpointOptions::max_queued_calls)
      .def_readwrite("fixed_members", &EndpointOptions::fixed_members)
      .def("set_times", [](EndpointOptions& options, double timeout, double heartbeat_timeout) {
        options.timeout = PyAgent::duration(timeout);
        options.heartbeat_timeout = PyAgent::duration(heartbeat_timeout);
      });
  module.def("rpc_join", &join, py::arg("options"), py::arg("store"), py::arg("process_group"), py::arg("lease"),
             py::arg("operators"), no_gil);
}

}  // namespace muster::python
