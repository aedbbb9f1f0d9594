#include "muster/rpc/server.h"

#include <fmt/format.h>

#include <algorithm>

#include "muster/rpc/client.h"

namespace muster::rpc {
namespace {

/// If more bytes of results than this wait for a caller to read them, its next functions start later.
constexpr size_t kMaxUnreadBytes = kMaxBytesInFlight;
constexpr uint64_t kMaxTimeoutUs = uint64_t{365} * 86'400 * 1'000'000;

}  // namespace

struct Server::Caller {
  WorkerInfo worker;                 ///< without a name until its hello has arrived
  std::unique_ptr<Channel> channel;  ///< null once the link has ended
  uint64_t last_id = 0;              ///< of its requests
  std::unordered_map<uint64_t, ServedPtr> serving;
  CallWindow window{kCallWindow};    ///< of the requests in `serving`
  std::atomic<bool> behind = false;  ///< over kMaxUnreadBytes; written with the lock, a hint without it
  std::vector<ServedPtr> held;       ///< calls that start when it is not behind any more
  bool corked = false;
};

/// The request, the task that runs it and the receiver of its result are one object.
class Server::ServedCall : public LoopDriver::Task,
                           public Responder::Sink,
                           public std::enable_shared_from_this<ServedCall> {
 public:
  ServedCall(Server& server, Request request, uint64_t id)
      : server_(server),
        owner_(server.owner_),
        request_(std::move(request)),
        logged_(server.log_.begin(CallSide::kCallee, shown_name(request_.function), request_.from.name,
                                  request_.arguments.footprint())) {
    CallLog::set_request(logged_, request_.from.id, id);
  }

  /// Needs the lock. A call that has not started does not keep its arguments.
  void cancel() {
    canceled_.store(true, std::memory_order_relaxed);
    if (!claimed_.exchange(true)) request_.arguments = {};
  }

  /// A function may finish its call after the server is gone.
  void finish(CallResult result) final {
    const auto alive = owner_.lock();
    if (!alive) return;
    if (result) {
      const auto valid = check_message("result", *result, server_.options_.max_message_bytes);
      if (!valid) result = tl::unexpected(CallError{valid.error(), {}, {}});
    }
    send(std::move(result));
  }

 protected:
  virtual void send(CallResult result) = 0;
  void refuse(ErrorCode code, std::string why) { finish(tl::unexpected(local_error(code, std::move(why)))); }
  /// False if the caller does not wait any more: the call has ended without its function.
  bool claim() {
    const bool canceled = claimed_.exchange(true);
    if (!canceled && !request_.deadline.passed()) return true;
    refuse(canceled ? ErrorCode::kAborted : ErrorCode::kTimeout,
           "the caller stopped waiting before the function began");
    return false;
  }
  void run_function() {
    server_.log_.started(logged_);
    request_.canceled_ = std::shared_ptr<const std::atomic<bool>>(shared_from_this(), &canceled_);
    server_.functions_.run(std::move(request_), Responder(shared_from_this()));
  }

  Server& server_;
  const std::weak_ptr<void> owner_;
  Request request_;
  LoggedCall logged_;  ///< ended with the lock

 private:
  std::atomic<bool> canceled_ = false;
  std::atomic<bool> claimed_ = false;  ///< by run() or by cancel(), and the arguments with it
};

class Server::RemoteCall final : public ServedCall {
 public:
  RemoteCall(Server& server, Request request, std::shared_ptr<Caller> by, const ParsedMessage& message, bool serial)
      : ServedCall(server, std::move(request), message.header.id),
        caller(std::move(by)),
        id(message.header.id),
        footprint(message.footprint),
        one_way((message.header.flags & kOneWay) != 0),
        reports_start_(caller->window.is_crowded()),
        retry_((message.header.flags & kRetry) != 0),
        serial_(serial) {}

  bool is_serial() const override { return serial_; }

  void run() override {
    if (caller->behind.load(std::memory_order_relaxed) && server_.hold(*this)) return;
    if (!claim()) return;
    if (retry_ && !server_.functions_.options_of(request_.function).idempotent) {
      return refuse(ErrorCode::kPeerLost,
                    fmt::format("the connection broke while this call was running, and \"{}\" was not added as "
                                "idempotent: it may have run",
                                shown_name(request_.function)));
    }
    if (one_way) server_.acknowledge(*this);
    if (reports_start_ && !one_way) server_.report_start(*this);
    run_function();
  }

  const std::shared_ptr<Caller> caller;
  const uint64_t id, footprint;
  const bool one_way;
  bool start_was_reported = false;  ///< guarded by the lock

 private:
  void send(CallResult result) override { server_.finish(*this, std::move(result), logged_); }

  const bool reports_start_, retry_, serial_;
};

class Server::SelfCall final : public ServedCall {
 public:
  SelfCall(Server& server, Request request, bool one_way, std::function<void(CallResult)> done)
      : ServedCall(server, std::move(request), 0), one_way_(one_way), done_(std::move(done)) {}
  void run() override {
    if (!claim()) return;
    if (one_way_) done_(Message());
    run_function();
  }

 private:
  void send(CallResult result) override {
    {
      const auto lock = server_.driver_.lock();
      server_.log_.end(logged_, result);
    }
    done_(std::move(result));
    const auto lock = server_.driver_.lock();
    --server_.running_;
    --server_.self_calls_;
    server_.driver_.notify();
  }

  const bool one_way_;
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
  // The channel belongs to the caller. A weak pointer, because a message's call shares the caller.
  caller->channel = std::make_unique<Channel>(
      link, options_.max_message_bytes,
      Channel::Events{.announced = [this, &caller = *caller](
                                       const ParsedMessage& message) { return on_announced(caller, message); },
                      .received =
                          [this, weak = std::weak_ptr(caller)](ParsedMessage message) {
                            if (const auto sender = weak.lock()) on_message(sender, std::move(message));
                          },
                      .written = [this, &caller = *caller] { on_written(caller); },
                      .ended = ended});
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
  release_held(caller);
  caller.serving.clear();
  caller.channel.reset();
}

/// False if the caller does not wait for the call any more, or is gone.
bool Server::remove(RemoteCall& call) {
  if (call.caller->serving.erase(call.id) == 0) return false;
  call.caller->window.end(call.footprint, call.start_was_reported);
  return true;
}

// ---- requests

/// Checks a message before memory is allocated for it. The caller's own window keeps the limits: this worker removes a
/// call before it answers, so it never counts more than the caller.
Result<> Server::on_announced(Caller& caller, const ParsedMessage& message) {
  const MessageHeader& header = message.header;
  if (caller.worker.name.empty()) return on_hello(caller, message);
  if (header.kind == Kind::kCancel && message.long_parts.empty()) return {};
  if (header.kind != Kind::kRequest) {
    return fail(ErrorCode::kProtocol,
                fmt::format("sent a message of kind {} to a worker that it calls", static_cast<int>(header.kind)));
  }
  if (header.id <= caller.last_id) {
    return fail(ErrorCode::kProtocol, fmt::format("sent request {} after request {}", header.id, caller.last_id));
  }
  if (!caller.window.has_room(message.footprint)) {
    return fail(ErrorCode::kProtocol, fmt::format("sent a request of {} without waiting for room: {} have no result",
                                                  format_bytes(message.footprint), caller.serving.size()));
  }
  caller.last_id = header.id;
  return {};
}

Result<> Server::on_hello(Caller& caller, const ParsedMessage& hello) {
  if (hello.header.kind != Kind::kHello || hello.name.empty() || !hello.long_parts.empty()) {
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

void Server::on_message(const std::shared_ptr<Caller>& caller, ParsedMessage message) {
  const MessageHeader& header = message.header;
  if (header.kind == Kind::kCancel) {
    const auto found = caller->serving.find(header.id);
    if (found != caller->serving.end()) found->second->cancel();
  }
  if (header.kind != Kind::kRequest) return;
  // From the arrival of the header: the long parts may have taken most of the time.
  const Deadline deadline =
      Deadline::at(message.arrived + std::chrono::microseconds(std::min(header.timeout_us, kMaxTimeoutUs)));
  Request request{caller->worker, std::string(message.name), std::move(message.message), deadline, {}};
  const FunctionOptions options = functions_.options_of(request.function);
  caller->window.add(message.footprint);
  const auto call = std::make_shared<RemoteCall>(*this, std::move(request), caller, message, options.serial);
  caller->serving.emplace(call->id, call);
  ++running_;
  if (options.brief) return driver_.add_callback([call] { call->run(); });
  driver_.add_task(std::shared_ptr<LoopDriver::Task>(call));
}

Result<std::function<void()>> Server::serve_self(Request request, bool one_way, std::function<void(CallResult)> done) {
  if (self_calls_ >= options_.max_queued_calls) {
    return fail(ErrorCode::kResourceExhausted,
                fmt::format("{} calls of this worker to itself wait already: wait for some of them first",
                            options_.max_queued_calls));
  }
  const auto call = std::make_shared<SelfCall>(*this, std::move(request), one_way, std::move(done));
  ++running_;
  ++self_calls_;
  driver_.add_task(std::shared_ptr<LoopDriver::Task>(call));
  return [weak = std::weak_ptr(call)] {
    if (const auto alive = weak.lock()) alive->cancel();
  };
}

// ---- results

void Server::acknowledge(RemoteCall& call) {
  const auto lock = driver_.lock();
  if (remove(call)) write(call, Kind::kStarted, {});
}

void Server::report_start(RemoteCall& call) {
  const auto lock = driver_.lock();
  if (!call.caller->serving.contains(call.id)) return;  // the caller is gone
  call.start_was_reported = true;
  call.caller->window.start(call.footprint);
  write(call, Kind::kStarted, {});
}

void Server::finish(RemoteCall& call, CallResult result, LoggedCall& logged) {
  const auto lock = driver_.lock();
  log_.end(logged, result);
  if (closed_) return;
  --running_;
  driver_.notify();
  if (!remove(call)) return;  // one-way, or the caller is gone
  write(call, result ? Kind::kReply : Kind::kError, result ? *result : encode_error(result.error()));
}

/// If more functions are about to run on this thread, the result waits for theirs, and all travel together.
void Server::write(RemoteCall& call, Kind kind, const Message& message) {
  Caller& caller = *call.caller;
  caller.channel->write({.kind = kind, .id = call.id}, {}, message);
  if (!driver_.runs_more_tasks() || caller.channel->is_full()) {
    caller.channel->flush();
    if (!caller.channel->is_idle()) driver_.wake();  // the thread that drives the loop writes the rest
  } else if (!std::exchange(caller.corked, true)) {
    corked_.push_back(call.caller);
  }
  caller.behind = caller.channel->unwritten() > kMaxUnreadBytes;
}

void Server::flush() {
  for (const auto& caller : corked_) {
    caller->corked = false;
    if (caller->channel) caller->channel->flush();
  }
  corked_.clear();
}

void Server::on_written(Caller& caller) {
  if (!caller.behind || caller.channel->unwritten() > kMaxUnreadBytes) return;
  caller.behind = false;
  release_held(caller);
}

/// Keeps a call of a caller that does not read its results from starting. Its requests are still read: they are
/// bounded, and so pings and cancellations arrive.
bool Server::hold(RemoteCall& call) {
  const auto lock = driver_.lock();
  Caller& caller = *call.caller;
  if (!caller.behind || !caller.serving.contains(call.id)) return false;
  caller.held.push_back(caller.serving.at(call.id));
  return true;
}

void Server::release_held(Caller& caller) {
  for (auto& call : std::exchange(caller.held, {}))
    driver_.add_task(std::shared_ptr<LoopDriver::Task>(std::move(call)));
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
