#include "muster/rpc/server.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/rpc/client.h"

namespace muster::rpc {
namespace {

/// The most requests of one caller that have no result: twice as many as muster's own client sends.
constexpr size_t kMaxServing = 2 * kMaxCallsInFlight;
constexpr uint64_t kMaxTimeoutUs = uint64_t{365} * 86'400 * 1'000'000;

}  // namespace

struct Server::Caller {
  WorkerInfo worker;                 ///< without a name until its hello has arrived
  std::unique_ptr<Channel> channel;  ///< null once the link has ended
  uint64_t last_id = 0;              ///< of its requests
  std::unordered_map<uint64_t, ServedPtr> serving;
  bool corked = false;
};

/// The request, the task that runs it and the receiver of its result are one object.
class Server::ServedCall : public LoopDriver::Task,
                           public Responder::Sink,
                           public std::enable_shared_from_this<ServedCall> {
 public:
  ServedCall(Server& server, Request request) : server_(server), owner_(server.owner_), request_(std::move(request)) {}

  /// A function may finish its call after the server is gone.
  void finish(CallResult result) final {
    if (const auto alive = owner_.lock()) send(std::move(result));
  }

 protected:
  virtual void send(CallResult result) = 0;
  void run_function() { server_.functions_.run(std::move(request_), Responder(shared_from_this())); }

  Server& server_;
  const std::weak_ptr<void> owner_;
  Request request_;
};

class Server::RemoteCall final : public ServedCall {
 public:
  RemoteCall(Server& server, Request request, std::shared_ptr<Caller> by, const MessageHeader& header)
      : ServedCall(server, std::move(request)),
        caller(std::move(by)),
        id(header.id),
        one_way((header.flags & kOneWay) != 0),
        retry_((header.flags & kRetry) != 0) {}

  void cancel() { canceled_.store(true, std::memory_order_relaxed); }

  void run() override {
    if (canceled_.load(std::memory_order_relaxed) || request_.deadline.passed()) {
      return refuse(ErrorCode::kAborted, "the caller stopped waiting before the function began");
    }
    if (retry_ && !server_.functions_.is_idempotent(request_.function)) {
      return refuse(ErrorCode::kPeerLost,
                    fmt::format("the connection broke while this call was running, and \"{}\" was not added as "
                                "idempotent: it may have run",
                                request_.function));
    }
    if (one_way) server_.acknowledge(*this);
    request_.canceled_ = std::shared_ptr<const std::atomic<bool>>(shared_from_this(), &canceled_);
    run_function();
  }

  const std::shared_ptr<Caller> caller;
  const uint64_t id;
  const bool one_way;

 private:
  void send(CallResult result) override { server_.finish(*this, std::move(result)); }
  void refuse(ErrorCode code, std::string why) { finish(tl::unexpected(local_error(code, std::move(why)))); }

  const bool retry_;
  std::atomic<bool> canceled_ = false;
};

class Server::SelfCall final : public ServedCall {
 public:
  SelfCall(Server& server, Request request, std::function<void(CallResult)> done)
      : ServedCall(server, std::move(request)), done_(std::move(done)) {}
  void run() override { run_function(); }

 private:
  void send(CallResult result) override {
    done_(std::move(result));
    const auto lock = server_.driver_.lock();
    --server_.running_;
    server_.driver_.notify();
  }

  const std::function<void(CallResult)> done_;
};

void Server::on_linked(Rank rank, Link& link) {
  const auto caller = callers_[rank] = std::make_shared<Caller>();
  caller->worker.id = rank;
  const auto ended = [this, rank, weak = std::weak_ptr(caller)](const Error&) {
    driver_.loop().post([this, rank, weak] {
      if (const auto lost = weak.lock(); lost && lost->channel) on_lost(rank);
    });
  };
  // A weak pointer, because the caller owns the channel.
  caller->channel = std::make_unique<Channel>(
      link, options_.max_message_bytes,
      [this, weak = std::weak_ptr(caller)](ParsedMessage message) {
        if (const auto sender = weak.lock()) on_message(sender, std::move(message));
      },
      ended);
  caller->channel->start();
}

void Server::on_lost(Rank rank) {
  const auto found = callers_.find(rank);
  if (found == callers_.end()) return;
  links_.forget(rank, LinkTable::Side::kAccepted);  // before its channel, which the link refers to
  drop(*found->second);
  callers_.erase(found);
}

void Server::cancel_calls(Caller& caller) {
  for (const auto& [id, call] : caller.serving) call->cancel();
}

/// Its calls refer to the caller, so they are removed from it.
void Server::drop(Caller& caller) {
  cancel_calls(caller);
  caller.serving.clear();
  caller.channel.reset();
}

// ---- requests

void Server::on_message(const std::shared_ptr<Caller>& caller, ParsedMessage message) {
  if (const Result<> handled = handle_message(caller, message); !handled) {
    Link& link = caller->channel->link();
    Error why = handled.error();
    why.message = fmt::format("{} {}", link.peer().to_string(), why.message);
    caller->channel->close(why);
  }
}

Result<> Server::handle_message(const std::shared_ptr<Caller>& caller, ParsedMessage& message) {
  if (caller->worker.name.empty()) return on_hello(*caller, message);
  if (message.header.kind == Kind::kRequest) return on_request(caller, message);
  if (message.header.kind != Kind::kCancel) {
    return fail(ErrorCode::kProtocol, fmt::format("sent a message of kind {} to a worker that it calls",
                                                  static_cast<int>(message.header.kind)));
  }
  const auto found = caller->serving.find(message.header.id);
  if (found != caller->serving.end()) found->second->cancel();
  return {};
}

Result<> Server::on_hello(Caller& caller, const ParsedMessage& hello) {
  if (hello.header.kind != Kind::kHello || hello.name.empty()) {
    return fail(ErrorCode::kProtocol, "did not send its name first");
  }
  if (hello.header.flags != kWireVersion) {
    return fail(ErrorCode::kMismatch,
                fmt::format("speaks version {} of RPC, this worker version {}; install one muster everywhere",
                            hello.header.flags, kWireVersion));
  }
  Reader process(hello.message.head);
  MUSTER_ASSIGN(const auto pid, process.get<int32_t>());
  MUSTER_ASSIGN(std::string domain, process.get_string());
  MUSTER_TRY(process.finish());
  caller.worker.name = hello.name;
  const Rank rank = caller.worker.id;
  if (links_.find_endpoint(rank) == nullptr) {
    links_.set_endpoint(rank, {caller.worker.to_string(), {pid, std::move(domain)}, {}, Transport::kTcp});
  }
  links_.monitor_process(rank);
  return {};
}

Result<> Server::on_request(const std::shared_ptr<Caller>& caller, ParsedMessage& message) {
  const MessageHeader& header = message.header;
  if (header.id <= caller->last_id) {
    return fail(ErrorCode::kProtocol, fmt::format("sent request {} after request {}", header.id, caller->last_id));
  }
  if (caller->serving.size() >= kMaxServing) {
    return fail(ErrorCode::kProtocol, fmt::format("sent {} requests without waiting for a result", kMaxServing));
  }
  caller->last_id = header.id;
  const std::chrono::microseconds timeout(std::min(header.timeout_us, kMaxTimeoutUs));
  Request request{caller->worker, std::string(message.name), std::move(message.message), Deadline::after(timeout), {}};
  const auto call = std::make_shared<RemoteCall>(*this, std::move(request), caller, header);
  caller->serving.emplace(call->id, call);
  ++running_;
  driver_.add_task(std::shared_ptr<LoopDriver::Task>(call));
  return {};
}

void Server::serve_self(Request request, std::function<void(CallResult)> done) {
  ++running_;
  driver_.add_task(
      std::shared_ptr<LoopDriver::Task>(std::make_shared<SelfCall>(*this, std::move(request), std::move(done))));
}

// ---- results

void Server::acknowledge(RemoteCall& call) {
  const auto lock = driver_.lock();
  if (call.caller->serving.erase(call.id) != 0) write(call, Kind::kStarted, {});
}

void Server::finish(RemoteCall& call, CallResult result) {
  if (result) {
    if (const auto valid = check_message("result", *result, options_.max_message_bytes); !valid) {
      result = tl::unexpected(CallError{valid.error(), {}, {}});
    }
  }
  const auto lock = driver_.lock();
  if (closed_) return;
  --running_;
  driver_.notify();
  if (call.caller->serving.erase(call.id) == 0) return;  // one-way, or the caller is gone
  write(call, result ? Kind::kReply : Kind::kError, result ? *result : encode_error(result.error()));
}

/// If more functions are about to run on this thread, the result waits for theirs, and all travel together.
void Server::write(RemoteCall& call, Kind kind, const Message& message) {
  Caller& caller = *call.caller;
  caller.channel->write({.kind = kind, .id = call.id}, {}, message);
  if (!driver_.runs_more_tasks() || caller.channel->is_full()) {
    caller.channel->flush();
    if (!caller.channel->is_idle()) driver_.wake();  // the thread that drives the loop writes the rest
    return;
  }
  if (!std::exchange(caller.corked, true)) corked_.push_back(call.caller);
}

void Server::flush() {
  for (const auto& caller : corked_) {
    caller->corked = false;
    if (caller->channel) caller->channel->flush();
  }
  corked_.clear();
}

bool Server::is_idle() const {
  return running_ == 0 && std::ranges::all_of(callers_, [](const auto& entry) {
           const auto& channel = entry.second->channel;
           return !channel || !channel->link().is_open() || channel->is_idle();
         });
}

void Server::cancel_calls() {
  for (const auto& [rank, caller] : callers_) cancel_calls(*caller);
}

void Server::close() {
  closed_ = true;
  for (const auto& [rank, caller] : callers_) drop(*caller);
  callers_.clear();
  corked_.clear();
}

}  // namespace muster::rpc
