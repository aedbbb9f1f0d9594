#include "muster/rpc/endpoint.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <system_error>
#include <thread>

#include "muster/base/hash.h"
#include "muster/base/host_name.h"
#include "muster/base/log.h"
#include "muster/base/random.h"
#include "muster/flight/recorder.h"
#include "muster/io/outward_address.h"
#include "muster/rpc/client.h"
#include "muster/rpc/server.h"
#include "muster/store/job_store.h"
#include "muster/transport/link_hello.h"
#include "muster/transport/link_options.h"
#include "muster/transport/transport.h"

namespace muster::rpc {
namespace {

/// The ids of workers are the ranks of their links, and below this number.
constexpr int kMaxWorkers = 1 << 30;
/// If a function runs for longer than this, another thread takes over the loop and the next functions.
constexpr Duration kGrace = 100us;
/// A thread that has waited for longer, for example in shutdown(), leaves the loop to threads that run functions or
/// make calls.
constexpr Duration kMaxDrive = 10ms;
/// How long a worker that leaves tries to remove its name from the store.
constexpr Duration kLeaveTime = 2s;
/// Functions that are canceled at the deadline of shutdown() may take so long to return.
constexpr Duration kReturnTime = 100ms;

Result<> check_options(const EndpointOptions& options) {
  const auto invalid = [](const std::string& what) { return fail(ErrorCode::kInvalidArgument, what); };
  if (options.name.empty() || options.name.size() > kMaxNameBytes) {
    return invalid(
        fmt::format("the name of a worker must have 1 to {} bytes, got {}", kMaxNameBytes, options.name.size()));
  }
  if (options.max_handlers < 1) return invalid(fmt::format("max_handlers must be > 0, got {}", options.max_handlers));
  if (options.tcp_streams < 1 || options.tcp_streams > kMaxSubflows) {
    return invalid(fmt::format("tcp_streams must be 1 to {}, got {}", kMaxSubflows, options.tcp_streams));
  }
  if (options.heartbeat_timeout < 100ms) return invalid("heartbeat_timeout must be at least 100 ms");
  return {};
}

/// A number that all workers of a group have, and no others. The secret cannot be computed from it.
uint64_t group_id(const EndpointOptions& options) { return fnv1a(options.group, fnv1a(options.credentials.secret)); }

/// The agent over muster's own links: one end of all calls of this process. The client makes calls, the server runs
/// them; both use one link table and one driver, whose lock guards everything.
class Endpoint final : public Agent, private LoopDriver::Delegate {
 public:
  static Result<std::shared_ptr<Endpoint>> start(std::shared_ptr<Store> store, EndpointOptions options) {
    const Deadline deadline = Deadline::after(options.timeout);
    MUSTER_TRY(check_options(options));
    MUSTER_ASSIGN(auto loop, Loop::create());
    auto directory = std::make_unique<Directory>(std::move(store), options.group);
    MUSTER_ASSIGN(options.credentials.secret, directory->agree_on_secret(options.credentials.secret, deadline));
    MUSTER_ASSIGN(const int id, directory->new_id(deadline));
    const std::shared_ptr<Endpoint> endpoint(
        new Endpoint(std::move(options), id, std::move(directory), std::move(loop)), release);
    endpoint->server_->set_owner(endpoint);
    MUSTER_TRY(endpoint->listen());
    if (const auto setup = std::exchange(endpoint->options_.setup, {})) {
      MUSTER_TRY(setup(*endpoint));
    }
    MUSTER_TRY(endpoint->directory_->join(endpoint->self_, deadline));
    endpoint->joined_ = true;
    return endpoint;
  }

  const WorkerInfo& self() const override { return self_.worker; }
  Result<> add_function(const std::string& name, Handler handler, FunctionOptions options) override {
    return functions_.add(name, std::move(handler), options);
  }
  Result<> add_fallback(Handler handler, FunctionOptions options) override {
    return functions_.add_fallback(std::move(handler), options);
  }

  Future call(const std::string& to, const std::string& function, Message arguments,
              const CallOptions& options) override {
    const auto call = std::make_shared<OutgoingCall>(shared_from_this());
    call->to = to;
    call->function = function;
    call->options = options;
    if (const auto valid = check_message(function, arguments, options_.max_message_bytes); !valid) {
      (void)call->finish(tl::unexpected(CallError{valid.error().in(call->to_string()), {}, {}}));
      return Future(call);
    }
    call->arguments = std::move(arguments);
    LoopDriver::Lock lock = driver_.lock();
    if (!closed_) driver_.poll();  // results of earlier calls may make room in the window
    const TimePoint now = steady_clock().now();
    client_->begin(call, now);
    const auto start = [&] { to == self_.worker.name && !closed_ ? call_self(call) : client_->dispatch(call, now); };
    if (options.waits && !closed_) {
      driver_.wait_until(
          lock, [&] { return call->done(); }, Deadline::never(), start);
    } else {
      start();
      driver_.provide_progress();
    }
    driver_.run_callbacks(lock);
    return Future(call);
  }

  void post(std::function<void()> function) override {
    const LoopDriver::Lock lock = driver_.lock();
    if (!closed_) driver_.add_task(std::move(function));
  }

  void wait(CallState& state, const Deadline& deadline) override {
    if (state.done()) return;
    LoopDriver::Lock lock = driver_.lock();
    driver_.wait_until(
        lock, [&] { return state.done(); }, deadline);
    driver_.run_callbacks(lock);
  }

  void wait_until(const std::function<bool()>& done, const Deadline& deadline) override {
    LoopDriver::Lock lock = driver_.lock();
    driver_.wait_until(
        lock, [&] { return closed_ || done(); }, deadline);
    driver_.run_callbacks(lock);
  }

  void cancel(CallState& state) override {
    LoopDriver::Lock lock = driver_.lock();
    client_->abandon(static_cast<OutgoingCall&>(state), local_error(ErrorCode::kAborted, "the caller canceled it"));
    driver_.wake();
    driver_.run_callbacks(lock);
  }

  Result<std::vector<WorkerInfo>> workers(const Deadline& deadline) override {
    const LoopDriver::BlockedTask blocked(driver_);
    MUSTER_ASSIGN(const auto records, directory_->list(deadline));
    std::vector<WorkerInfo> workers;
    for (const WorkerRecord& record : records) workers.push_back(record.worker);
    return workers;
  }
  Result<> barrier(const std::string& name, int count, const Deadline& deadline) override {
    const LoopDriver::BlockedTask blocked(driver_);
    return directory_->barrier(name, count, deadline);
  }

  Result<> wait_for_calls(const Deadline& deadline) override {
    LoopDriver::Lock lock = driver_.lock();
    const auto ended = [this] { return !client_->has_pending(); };
    driver_.wait_until(lock, ended, deadline);
    const bool done = ended();
    driver_.run_callbacks(lock);
    if (done) return {};
    return fail(ErrorCode::kTimeout, fmt::format("worker \"{}\" still has pending calls", self_.worker.name));
  }

  Result<> shutdown(const Deadline& deadline) override {
    if (driver_.is_inside()) {
      return fail(ErrorCode::kInvalidArgument, "a function or a callback must not shut its own worker down");
    }
    if (getpid() != self_.process.pid) {
      return fail(ErrorCode::kInvalidArgument, "a forked child must not shut down the worker of its parent");
    }
    LoopDriver::Lock lock = driver_.lock();
    const Result<> left = leave(lock, deadline);
    if (!links_closed()) return left;
    const TimePoint soon = steady_clock().now() + kReturnTime;
    if (end(lock, Deadline::at(std::max(deadline.when(), soon)))) return left;
    leave_behind();
    const std::string running = functions_.running();
    return fail(ErrorCode::kTimeout, fmt::format("worker \"{}\" has left, but has not returned from: {}",
                                                 self_.worker.name, running.empty() ? "a callback" : running));
  }

 private:
  Endpoint(EndpointOptions options, int id, std::unique_ptr<Directory> directory, std::unique_ptr<Loop> loop)
      : options_(std::move(options)),
        directory_(std::move(directory)),
        log_(Recorder::entries_from_environment(), options_.group, group_id(options_), options_.name, id),
        driver_(std::move(loop), *this, {.grace = kGrace, .max_tasks = options_.max_handlers, .max_drive = kMaxDrive}) {
    self_.worker = {options_.name, id};
    self_.host = host_name();
    self_.process = {getpid(), process_domain()};
    self_.memory_domain = shared_memory_domain();
    LinkIdentity identity{id, kMaxWorkers, "rpc/" + options_.group, 0, options_.credentials};
    identity.retry_refused = false;
    links_.emplace(driver_.loop(), std::move(identity), options_.tcp_streams);
    client_.emplace(driver_, *links_, *directory_, options_, self_, log_);
    server_.emplace(driver_, *links_, functions_, options_, log_);
    links_->set_events(
        {.linked = [this](Rank rank, LinkTable::Side side, Link& link) { on_linked(rank, side, link); },
         .lost = [this](Rank rank, LinkTable::Side side, const Error& why) { on_lost(rank, side, why); },
         .dial_failed = [this](Rank rank, const Error& why) { return client_->on_dial_failed(rank, why); },
         .died = [this](Rank rank, const Error& why) { on_died(rank, why); },
         .replaced = [this](Rank rank) { server_->on_lost(rank); }});
  }
  ~Endpoint() override = default;

  /// The deleter. A forked child must not end its parent's links: there the object is left as it is.
  static void release(Endpoint* endpoint) {
    if (getpid() != endpoint->self_.process.pid) return;
    const auto destroy = [endpoint] {
      LoopDriver::Lock lock = endpoint->driver_.lock();
      (void)endpoint->leave(lock, Deadline::after(Duration::zero()));
      endpoint->end(lock, Deadline::never());
      lock.unlock();
      delete endpoint;
    };
    if (!endpoint->driver_.is_inside()) return destroy();
    start_detached(destroy);  // this thread cannot wait for itself
  }

  /// For functions that do not return: the endpoint lives until they do.
  void leave_behind() {
    if (std::exchange(left_behind_, true)) return;
    start_detached([self = std::static_pointer_cast<Endpoint>(shared_from_this())] {
      LoopDriver::Lock lock = self->driver_.lock();
      self->end(lock, Deadline::never());
    });
  }

  static void start_detached(const std::function<void()>& run) {
    try {
      std::thread(run).detach();  // tidy: allow(detach) it may end its own owner, or wait for a function forever
    } catch (const std::system_error& error) {
      log(LogLevel::kWarning, std::string("cannot start the thread that ends an RPC endpoint: ") + error.what());
    }
  }

  Result<> listen() {
    MUSTER_ASSIGN(const auto transports, parse_transports(options_.relay ? "unix" : options_.transports));
    const auto lock = driver_.lock();
    if (transports.front() != Transport::kTcp) {
      std::array<uint8_t, 12> name;
      fill_secure_random(name);
      const Address address = Address::unix_abstract("muster-rpc-" + to_hex(name));
      MUSTER_ASSIGN(self_.local_address, links_->listen(address, transports.front()));
    }
    if (options_.relay) {
      MUSTER_ASSIGN(self_.local_address, options_.relay->publish(Address::parse(self_.local_address).value()));
    }
    if (std::ranges::count(transports, Transport::kTcp) != 0) {
      Address address = outward_address();
      if (!options_.interface.empty()) {
        MUSTER_ASSIGN(address, interface_address(options_.interface));
      }
      MUSTER_ASSIGN(self_.tcp_address, links_->listen(address, Transport::kTcp));
    }
    links_->set_endpoint(self_.worker.id, {self_.to_string(), self_.process, {}, Transport::kTcp});
    driver_.provide_progress();
    return {};
  }

  /// The segments are copied, as if they had traveled.
  void call_self(const CallPtr& call) {
    Request request{
        self_.worker, call->function, std::exchange(call->arguments, {}), Deadline::at(call->deadline->first), {}};
    for (Buffer& segment : request.arguments.segments) segment = Buffer::copy_of(segment.view());
    auto cancel = server_->serve_self(std::move(request), call->options.one_way, [this, call](CallResult result) {
      LoopDriver::Lock lock = driver_.lock();
      client_->finish(*call, std::move(result));
      driver_.run_callbacks(lock);
    });
    if (!cancel) return client_->finish(*call, tl::unexpected(CallError{cancel.error(), {}, {}}));
    call->cancel_here = std::move(*cancel);
    CallLog::set_request(call->logged, self_.worker.id, 0);
    log_.started(call->logged);
  }

  void on_linked(Rank rank, LinkTable::Side side, Link& link) {
    if (side == LinkTable::Side::kDialed) {
      client_->on_linked(rank, link);
    } else {
      server_->on_linked(rank, link);
    }
  }

  /// A link has ended, or a subflow of an incomplete one. The channel of a complete link notices its end by itself.
  void on_lost(Rank rank, LinkTable::Side side, const Error& why) {
    driver_.loop().post([this, rank, side, why] {
      if (side == LinkTable::Side::kDialed && client_->is_dialing(rank)) client_->on_lost(rank, why);
      if (side == LinkTable::Side::kAccepted && links_->link(rank, side) == nullptr) links_->forget(rank, side);
    });
  }

  void on_died(Rank rank, const Error& why) {
    server_->on_lost(rank);
    client_->on_lost(rank, why);
  }

  bool links_closed() const { return !links_ || links_->is_closed(); }

  /// Waits until nothing is pending, or until the deadline, and leaves the group. Several threads may do so: one
  /// leaves, the others wait for it.
  Result<> leave(LoopDriver::Lock& lock, const Deadline& deadline) {
    const auto idle = [this] { return !client_->has_pending() && server_->is_idle(); };
    driver_.wait_until(
        lock, [&] { return closed_ || idle(); }, deadline);
    if (closed_) {
      driver_.wait_until(
          lock, [this] { return links_closed(); }, deadline);
      if (links_closed()) return {};
      return fail(ErrorCode::kTimeout,
                  fmt::format("worker \"{}\" is being shut down by another thread", self_.worker.name));
    }
    const std::string pending = describe_pending();
    close(lock);
    if (pending.empty()) return {};
    return fail(ErrorCode::kTimeout,
                fmt::format("worker \"{}\" has left, but still had pending: {}", self_.worker.name, pending));
  }

  /// What leave() waits for. Empty: nothing.
  std::string describe_pending() const {
    if (client_->has_pending()) return client_->describe_pending();
    if (server_->is_idle()) return {};
    const std::string running = functions_.running();
    return running.empty() ? "an answer" : running;
  }

  void close(LoopDriver::Lock& lock) {
    closed_ = true;
    server_->cancel_calls();  // before the callers learn that this worker has left
    client_->end_calls(Error{ErrorCode::kAborted, fmt::format("worker \"{}\" was shut down", self_.worker.name)});
    driver_.notify();  // other threads in shutdown()
    lock.unlock();     // the store may have to be asked over the network
    client_->join_look_ups();
    if (joined_) (void)directory_->leave(self_, Deadline::after(kLeaveTime));
    lock.lock();
    Error left{ErrorCode::kLeft, self_.to_string() + " has left", self_.worker.id, {}};
    left.phase = GroupPhase::kLeft;
    server_->cancel_calls();  // of requests that have arrived meanwhile
    links_->close(left);      // before the channels, which the links refer to
    server_->close();
    client_->close();
    driver_.notify();
  }

  /// Waits until the functions and callbacks have returned. False if the deadline passes first.
  bool end(LoopDriver::Lock& lock, const Deadline& deadline) {
    if (driver_.stop(lock, deadline)) {
      links_.reset();
      driver_.close_loop();
      options_.relay.reset();
    }
    return driver_.stopped();
  }

  // LoopDriver::Delegate
  bool has_work() const override { return true; }
  void expire() override { client_->expire(); }
  TimePoint next_deadline() const override { return client_->next_deadline(); }
  void flush() override { server_->flush(); }

  EndpointOptions options_;  ///< does not change from the time the endpoint has joined until it has ended
  const std::unique_ptr<Directory> directory_;
  WorkerRecord self_;  ///< does not change once the endpoint has joined
  FunctionTable functions_;
  CallLog log_;  ///< guarded by the driver's lock, as the fields below
  LoopDriver driver_;
  std::optional<LinkTable> links_;
  std::optional<Client> client_;
  std::optional<Server> server_;
  bool joined_ = false, closed_ = false, left_behind_ = false;
};

}  // namespace

Result<std::shared_ptr<Agent>> start_endpoint(std::shared_ptr<Store> store, EndpointOptions options) {
  return Endpoint::start(std::move(store), std::move(options)).map([](auto endpoint) {
    return std::shared_ptr<Agent>(std::move(endpoint));
  });
}

Result<std::shared_ptr<Agent>> join_job(EndpointOptions options) {
  MUSTER_ASSIGN(LinkOptions links, link_options_from_environment());
  MUSTER_ASSIGN(const int rank, job_number("RANK"));
  MUSTER_ASSIGN(JobStore opened, open_job_store(links.credentials, rank == 0, Deadline::after(links.timeout)));
  const auto job = std::make_shared<JobStore>(std::move(opened));
  if (options.name.empty()) options.name = fmt::format("worker{}", rank);
  options.credentials = std::move(links.credentials);
  const EndpointOptions defaults;
  if (options.timeout == defaults.timeout) options.timeout = links.timeout;
  if (options.interface.empty()) options.interface = std::move(links.interface);
  if (options.tcp_streams == defaults.tcp_streams) options.tcp_streams = links.tcp_streams;
  if (options.transports == defaults.transports && !links.transports.empty()) {
    options.transports = std::move(links.transports);
  }
  return start_endpoint({job, job->store.get()}, std::move(options));
}

}  // namespace muster::rpc
