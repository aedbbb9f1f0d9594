// The RPC backend MUSTER of torch.distributed.rpc: torch's own RPC, references, distributed autograd and optimizers,
// with a muster agent below them.
#include <c10/core/thread_pool.h>
#include <torch/csrc/distributed/rpc/python_rpc_handler.h>
#include <torch/csrc/distributed/rpc/request_callback_impl.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "bindings.h"
#include "muster/rpc/endpoint.h"
#include "muster/torch/exception.h"
#include "muster/torch/rpc/value.h"
#include "muster/torch/store.h"
#include "muster/torch/tensor.h"

namespace muster::python {
namespace {

namespace stock = torch::distributed::rpc;
using stock::JitFuture;
using MessagePtr = c10::intrusive_ptr<stock::Message>;

constexpr const char* kFunction = "torch.distributed.rpc";
constexpr std::chrono::hours kLongest{24 * 365};

bool travels_as_it_is(const at::Tensor& tensor) { return check_sendable(tensor).has_value() && is_plain(tensor); }

/// A list of type, id, payload and tensors. If there are tensors that are sparse or have gaps, torch writes payload and
/// tensors together, and keeps layouts and strides.
rpc::Message encode(const stock::Message& message) {
  rpc::ValueWriter out;
  const std::vector<at::Tensor>& tensors = message.tensors();
  const bool plain = std::all_of(tensors.begin(), tensors.end(), travels_as_it_is);
  out.begin_list(4);
  out.put_int(message.type());
  out.put_int(message.id());
  const std::vector<char>& payload = message.payload();
  out.put_bytes(plain ? std::string_view(payload.data(), payload.size())
                      : std::string_view(stock::wireSerialize(payload, tensors)));
  if (!plain) {
    out.put_none();
    return out.take();
  }
  out.begin_list(tensors.size());
  for (const at::Tensor& tensor : tensors) out.put_tensor(tensor);
  return out.take();
}

MessagePtr decode(const rpc::Message& message) {
  using rpc::Tag;
  rpc::ValueReader in(message);
  in.expect(Tag::kList);
  if (in.count() != 4) throw_error(Error{ErrorCode::kProtocol, "a message of torch.distributed.rpc has four parts"});
  in.expect(Tag::kInt);
  const auto type = static_cast<stock::MessageType>(in.int_value());
  in.expect(Tag::kInt);
  const int64_t id = in.int_value();
  in.expect(Tag::kBytes);
  const std::string_view bytes = in.bytes_value();
  std::vector<char> payload;
  std::vector<at::Tensor> tensors;
  if (in.peek() == Tag::kNone) {
    (void)in.next();
    std::tie(payload, tensors) = stock::wireDeserialize(bytes.data(), bytes.size());
  } else {
    payload.assign(bytes.begin(), bytes.end());
    in.expect(Tag::kList);
    for (size_t left = in.count(); left > 0; --left) {
      in.expect(Tag::kTensor);
      tensors.push_back(in.tensor_value());
    }
  }
  in.finish();
  return c10::make_intrusive<stock::Message>(std::move(payload), std::move(tensors), type, id);
}

std::exception_ptr rpc_error(const std::string& what, stock::RPCErrorType type) {
  return std::make_exception_ptr(std::runtime_error(stock::makeRPCError(what, type)));
}

/// Marks a thread that is in send(). torch may hold the GIL or its own locks there. So the thread must not run torch's
/// callbacks, neither for this call nor for other calls whose results the agent finds meanwhile.
struct Sending {
  Sending() { is_active = true; }
  ~Sending() { is_active = false; }
  Sending(const Sending&) = delete;
  static thread_local bool is_active;
};
thread_local bool Sending::is_active = false;

class TorchAgent final : public stock::RpcAgent {
 public:
  /// `names`: of all workers, by rank.
  TorchAgent(std::shared_ptr<rpc::Agent> agent, c10::intrusive_ptr<c10d::Store> store, std::vector<std::string> names,
             int rank, std::chrono::milliseconds timeout, int threads)
      : RpcAgent(stock::WorkerInfo(names[rank], static_cast<int64_t>(rank)),
                 std::make_unique<stock::RequestCallbackImpl>(), timeout),
        agent_(std::move(agent)),
        store_(std::move(store)),
        threads_(threads),
        completions_(threads) {
    for (size_t i = 0; i < names.size(); ++i) workers_.emplace_back(names[i], static_cast<int64_t>(i));
  }
  /// Python drops the last reference, with the GIL.
  ~TorchAgent() override {
    const py::gil_scoped_release no_gil;
    if (rpcAgentRunning_) shutdown();
  }

  c10::intrusive_ptr<JitFuture> send(const stock::WorkerInfo& to, MessagePtr message, float timeout,
                                     const stock::DeviceMap& devices) override {
    TORCH_CHECK(rpcAgentRunning_, "this worker was shut down: it cannot send ", message->type());
    TORCH_CHECK(devices.empty(), "the RPC backend MUSTER moves tensors on the CPU: it takes no device map");
    const auto limit = timeout == stock::kUnsetRpcTimeout
                           ? getRpcTimeout()
                           : std::chrono::milliseconds(static_cast<int64_t>(timeout * stock::kSecToMsConversion));
    const rpc::CallOptions options{.timeout = limit.count() == 0 ? Duration(kLongest) : Duration(limit)};
    const auto future = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
    rpc::Message encoded = encode(*message);
    count(pending_, 1);
    const Sending sending;
    agent_->call(to.name_, kFunction, std::move(encoded), options)
        .then([this, future, limit](const rpc::CallResult& result) {
          const auto finish = [this, future, limit](const rpc::CallResult& ended) {
            complete(*future, ended, limit);
            count(pending_, -1);
          };
          if (!Sending::is_active) return finish(result);
          completions_.run([finish, result] { finish(result); });
        });
    return future;
  }

  const stock::WorkerInfo& getWorkerInfo(const std::string& name) const override {
    for (const auto& worker : workers_) {
      if (worker.name_ == name) return worker;
    }
    TORCH_CHECK(false, "could not find destination: no worker has the name \"", name, "\"");
  }
  const stock::WorkerInfo& getWorkerInfo(stock::worker_id_t id) const override {
    TORCH_CHECK(id >= 0 && id < std::ssize(workers_), "there is no worker with id ", id, ": there are ",
                workers_.size());
    return workers_[id];
  }
  std::vector<stock::WorkerInfo> getWorkerInfos() const override { return workers_; }

  /// Waits until no worker has a pending call. A worker may get calls of others after its own have ended, so the
  /// workers compare how many calls there were since the last round.
  void join(bool /*shutdown*/, float timeout) override {
    const Deadline deadline =
        Deadline::after(timeout == 0 ? Duration(kLongest)
                                     : std::chrono::duration_cast<Duration>(std::chrono::duration<float>(timeout)));
    for (int64_t total = 1; total != 0;) {
      wait_until_idle(deadline);
      const std::string round = "join/" + std::to_string(joins_++);
      store_->add(round, take_count());
      barrier(deadline);
      total = store_->add(round, 0);
      barrier(deadline);
    }
  }
  void sync() override { barrier(Deadline::after(kLongest)); }

  void startImpl() override {
    const auto added = agent_->add_function(
        kFunction,
        [this](const rpc::Request& request, rpc::Responder responder) { serve(request, std::move(responder)); }, {});
    value_or_throw(added);
  }
  void shutdownImpl() override { (void)agent_->shutdown(Deadline::after(std::chrono::seconds(5))); }

  std::unordered_map<std::string, std::string> getMetrics() override {
    const std::lock_guard lock(mutex_);
    std::unordered_map<std::string, std::string> metrics{
        {"agent.num_pending_requests", std::to_string(pending_)},
        {"agent.thread_pool_size", std::to_string(threads_)},
        {"agent.num_idle_threads", std::to_string(std::max(0, threads_ - serving_))}};
    if (isGILProfilingEnabled()) {
      const int64_t waits = std::max<int64_t>(gil_waits_, 1);
      metrics["agent.gil_average_wait_time_us"] = std::to_string(gil_wait_time_.count() / waits);
    }
    return metrics;
  }

 private:
  void addGilWaitTime(std::chrono::microseconds time) override {
    const std::lock_guard lock(mutex_);
    gil_wait_time_ += time;
    ++gil_waits_;
  }

  static void complete(JitFuture& future, const rpc::CallResult& result, std::chrono::milliseconds limit) {
    try {
      if (!result) {
        const bool late = result.error().error.code == ErrorCode::kTimeout;
        return future.setError(late ? rpc_error(timeout_message(limit), stock::TIMEOUT)
                                    : rpc_error(result.error().error.to_string(), stock::UNKNOWN_ERROR));
      }
      MessagePtr answer = decode(*result);
      if (answer->type() == stock::EXCEPTION) {
        const std::string text(answer->payload().begin(), answer->payload().end());
        return future.setError(std::make_exception_ptr(std::runtime_error(text)));
      }
      auto storages = answer->getStorages();
      future.markCompleted(std::move(answer), std::move(storages));
    } catch (...) {
      future.setErrorIfNeeded(std::current_exception());
    }
  }

  static std::string timeout_message(std::chrono::milliseconds limit) {
    std::string text = stock::kRpcTimeoutErrorStr;
    return text.replace(text.find("{}"), 2, std::to_string(limit.count()));
  }

  void serve(const rpc::Request& request, rpc::Responder given) {
    count(serving_, 1);
    const auto responder = std::make_shared<rpc::Responder>(std::move(given));
    int64_t id = -1;
    const auto reply = [this, responder](const stock::Message& answer) {
      responder->reply(encode(answer));
      count(serving_, -1);
    };
    try {
      const MessagePtr message = decode(request.arguments);
      id = message->id();
      const auto pending = (*cb_)(*message, {});
      pending->addCallback([reply, id](JitFuture& done) {
        if (done.hasError()) return reply(*stock::createExceptionResponse(done.tryRetrieveErrorMessage(), id));
        const auto answer = done.value().toCustomClass<stock::Message>();
        answer->setId(id);
        try {
          reply(*answer);
        } catch (const std::exception& error) {
          reply(*stock::createExceptionResponse(error, id));
        }
      });
    } catch (const std::exception& error) {
      reply(*stock::createExceptionResponse(error, id));
    }
  }

  /// Counts a call that begins (1) or ends (-1) in pending_ or serving_.
  void count(int& calls, int change) {
    const std::lock_guard lock(mutex_);
    calls += change;
    if (change > 0) ++count_;
    changed_.notify_all();
  }
  void wait_until_idle(const Deadline& deadline) {
    std::unique_lock lock(mutex_);
    const bool idle = changed_.wait_for(lock, std::min<Duration>(deadline.left(), kLongest),
                                        [this] { return pending_ == 0 && serving_ == 0; });
    TORCH_CHECK(idle, "worker ", workerInfo_.name_, " still has ", pending_, " calls, and runs ", serving_);
  }
  int64_t take_count() {
    const std::lock_guard lock(mutex_);
    return std::exchange(count_, 0);
  }
  void barrier(const Deadline& deadline) {
    value_or_throw(agent_->barrier("stock", static_cast<int>(workers_.size()), deadline));
  }

  const std::shared_ptr<rpc::Agent> agent_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int threads_;
  std::vector<stock::WorkerInfo> workers_;  ///< by rank
  int64_t joins_ = 0;
  std::mutex mutex_;  ///< guards the fields below
  std::condition_variable changed_;
  int pending_ = 0;    ///< calls of this worker
  int serving_ = 0;    ///< calls that this worker runs
  int64_t count_ = 0;  ///< calls since the last round of join()
  std::chrono::microseconds gil_wait_time_{};
  int64_t gil_waits_ = 0;
  /// Its threads complete the calls that a thread in send() must not complete. The last field: they use the others.
  c10::ThreadPool completions_;
};

std::shared_ptr<TorchAgent> make_agent(const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank,
                                       std::vector<std::string> names, double timeout, int threads) {
  rpc::EndpointOptions options;
  options.name = name;
  options.max_handlers = threads;
  options.fixed_members = true;
  auto agent = value_or_throw(rpc::start_endpoint(store_over_c10d(store->clone()), std::move(options)));
  const std::chrono::milliseconds limit(static_cast<int64_t>(timeout * 1000));
  return std::make_shared<TorchAgent>(std::move(agent), store, std::move(names), rank, limit, threads);
}

}  // namespace

void bind_rpc_torch_agent(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::module_::import("torch.distributed.rpc");  // registers RpcAgent
  // torch's own class lacks the overload for ids.
  py::class_<TorchAgent, stock::RpcAgent, std::shared_ptr<TorchAgent>>(module, "TorchRpcAgent")
      .def("get_worker_info", [](const TorchAgent& agent) { return agent.RpcAgent::getWorkerInfo(); })
      .def("get_worker_info",
           [](const TorchAgent& agent, const std::string& name) { return agent.getWorkerInfo(name); })
      .def("get_worker_info", [](const TorchAgent& agent, stock::worker_id_t id) { return agent.getWorkerInfo(id); });
  module.def("torch_rpc_agent", &make_agent, py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("names"),
             py::arg("timeout"), py::arg("threads"), no_gil);
}

}  // namespace muster::python
