#include "muster/store/server/server_loop.h"

#include <fmt/format.h>
#include <pthread.h>

#include "muster/base/log.h"
#include "muster/store/protocol/protocol.h"
#include "muster/store/server/buffered_connection.h"
#include "muster/store/server/server_session.h"

namespace muster {
namespace {

// PyTorch's protocol has no request numbers, so replies must come in the order of the requests. A client also considers
// a request without a reply to be done when it is sent. So the server finishes each request before it reads the next
// one. Waits and barriers are the exception, because their cancellation must overtake them.
bool must_finish_first(StoreOperation operation) {
  return operation != StoreOperation::kWait && operation != StoreOperation::kBarrier &&
         operation != StoreOperation::kCancel;
}

// Replies to proxies are collected for a while before they are sent: twice as long as the last round of sending took.
constexpr Duration kMinFlushGap = 100us, kMaxFlushGap = 4ms;
// With many proxies the gap grows with the number of proxies that the last round wrote to. The thread sleeps during the
// gap. Otherwise every incoming frame would wake it, although the replies wait anyway.
constexpr size_t kManyProxies = 8;
constexpr Duration kFlushGapPerProxy = 300us;
constexpr Duration kSessionCheckInterval = 500ms;

// Only one thread writes a counter, so a load and a store replace the slower fetch_add().
void count(std::atomic<uint64_t>& counter, uint64_t more = 1) {
  counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

// Zero before the thread starts and after it has ended.
double seconds_of(std::optional<clockid_t> clock) {
  timespec used{};
  if (!clock || clock_gettime(*clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace

struct ServerLoop::Client {
  ClientId id;
  ListenerId listener;
  std::string peer;                    // for the log; as text it takes less memory per connection
  std::unique_ptr<Protocol> protocol;  // null for a proxy
  // The next three fields are for a client that is a proxy. They outlive its connections.
  std::unique_ptr<ServerSession> session;  // null for other clients
  SessionId session_id{};
  TimePoint next_frame{};  // no frame before this time: see ServerSession::min_interval()
  std::optional<BufferedConnection> connection;
  bool tcpstore = false;     // uses PyTorch's protocol
  RequestId unfinished = 0;  // the request to answer before the next one is read; 0: none
  bool dirty = false;
  bool lost = false;
};

ServerLoop::ServerLoop(const StoreServerOptions& options, unsigned index, unsigned count, Others others,
                       std::unique_ptr<Loop> loop)
    : options_(options),
      index_(index),
      count_(count),
      others_(std::move(others)),
      loop_(std::move(loop)),
      request_timeouts_(loop_->clock(), options.request_timeout),
      remote_replies_(count),
      unauthenticated_log_(loop_->clock()),
      next_client_(count + index) {}

ServerLoop::~ServerLoop() { stop(); }

void ServerLoop::run() {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), fmt::format("store {}", index_).c_str());
    clockid_t clock;
    if (pthread_getcpuclockid(pthread_self(), &clock) == 0) cpu_clock_ = clock;
    // Every posted task wakes the loop, and so does stop(). So the loop can wait without a deadline.
    const Deadline never = Deadline::never();
    while (!stop_) {
      coalesce();
      loop_->run_once(never);
    }
  });
}

void ServerLoop::stop() {
  stop_ = true;
  loop_->wake();
  if (thread_.joinable()) thread_.join();
}

// ---- called by other threads

template <class Add>
void ServerLoop::post(Add add) {
  bool idle;
  {
    const std::lock_guard lock(mutex_);
    idle = inbox_.empty();
    add(inbox_);
  }
  if (idle) loop_->post([this] { take_inbox(); });
}

void ServerLoop::admit(AcceptedConnection accepted) {
  ++load_;
  post([&](Inbox& inbox) { inbox.accepted.push_back(std::move(accepted)); });
}

void ServerLoop::deliver(Replies replies) {
  post([&](Inbox& inbox) {
    if (inbox.replies.empty()) return inbox.replies.swap(replies);
    inbox.replies.insert(inbox.replies.end(), std::make_move_iterator(replies.begin()),
                         std::make_move_iterator(replies.end()));
  });
}

void ServerLoop::close_clients_of(ListenerId listener) {
  loop_->post([this, listener] {
    take_inbox();  // may hold a connection of this listener
    std::vector<Client*> theirs;
    for (const auto& [id, client] : clients_) {
      if (client->listener == listener) theirs.push_back(client.get());
    }
    for (Client* client : theirs) lose(*client, {ErrorCode::kPeerLost, "its listener was closed"});
    flush();
  });
}

void ServerLoop::take_inbox() {
  Inbox taken;
  {
    const std::lock_guard lock(mutex_);
    std::swap(taken, inbox_);
  }
  for (AcceptedConnection& accepted : taken.accepted) add_client(std::move(accepted));
  for (const Reply& reply : taken.replies) encode(reply);
  flush();
}

void ServerLoop::add_to(StoreStat& stat) const {
  for (size_t kind = 0; kind < counters_.operations.size(); ++kind) {
    const uint64_t count = counters_.operations[kind].load(std::memory_order_relaxed);
    if (count == 0) continue;
    stat.operations += count;
    stat.operations_by_kind[name(static_cast<StoreOperation>(kind))] += count;
  }
  stat.clients += counters_.clients;
  stat.bytes_in += counters_.bytes_in;
  stat.bytes_out += counters_.bytes_out;
  stat.messages_in += counters_.messages_in;
  stat.messages_out += counters_.messages_out;
  stat.cpu_seconds += seconds_of(cpu_clock_);
  ++stat.threads;
}

// ---- on the loop's thread

ServerLoop::Client& ServerLoop::new_client() {
  const ClientId id = next_client_;
  next_client_ += count_;
  Client& client = *clients_.emplace(id, std::make_unique<Client>()).first->second;
  client.id = id;
  count(counters_.clients);
  return client;
}

// Returns the client of the proxy's existing session, or a new client.
ServerLoop::Client& ServerLoop::proxy_client(const SessionId& session) {
  if (!std::exchange(checks_sessions_, true)) check_sessions();
  Client*& client = sessions_[session];
  if (client != nullptr) {
    client->connection->close();  // the proxy may notice a broken link before the server does
    --load_;
  } else {
    client = &new_client();
    client->session_id = session;
    client->session = std::make_unique<ServerSession>(loop_->clock(),
                                                      SessionExpiry::Limits{options_.lease_time, options_.link_grace});
    backend_->serves_proxies(sessions_.size());
  }
  client->session->link_up();
  return *client;
}

void ServerLoop::add_client(AcceptedConnection accepted) {
  Client& client = accepted.session ? proxy_client(*accepted.session) : new_client();
  client.listener = accepted.listener;
  client.peer = accepted.connection.peer.to_string();
  client.tcpstore = accepted.tcpstore;
  if (!client.session)
    client.protocol = accepted.tcpstore ? torch_protocol(std::move(accepted.prefix)) : muster_protocol();
  client.connection.emplace(*loop_, std::move(accepted.connection.stream),
                            BufferedConnection::Options{options_.max_reply_queue, options_.stall_timeout},
                            BufferedConnection::Handlers{[this, &client](ByteView bytes) { on_input(client, bytes); },
                                                         [this, &client](const Error& why) { on_lost(client, why); }});
  if (const auto started = client.connection->start(); !started) return lose(client, started.error());
  if (client.tcpstore || !accepted.connection.leftover.empty()) on_input(client, accepted.connection.leftover);
}

void ServerLoop::on_input(Client& client, ByteView bytes) {
  count(counters_.bytes_in, bytes.size());
  if (client.session) return on_frames(client, bytes);
  client.protocol->feed(bytes);
  in_batch_ = true;
  while (!client.lost && !client.connection->over() && take_request(client))
    continue;  // the rest of the input waits until the client reads its replies
  in_batch_ = false;
  const bool incomplete = !client.lost && client.protocol->midway();
  if (incomplete && request_timeouts_.heard(client.id)) arm_request_timeout();
  flush();
}

void ServerLoop::arm_request_timeout() {
  const auto when = request_timeouts_.next();
  if (!when) return;
  loop_->at(*when, [this] {
    for (const ClientId id : request_timeouts_.take_expired()) {
      const auto found = clients_.find(id);
      if (found == clients_.end()) continue;
      Client& client = *found->second;
      // If the server does not read from a client now, the client is checked again after its next input.
      if (client.connection->over() || !client.protocol->midway()) continue;
      lose(client, {ErrorCode::kTimeout, "it stopped in the middle of a request"});
    }
    arm_request_timeout();
  });
}

// Handles the frames of a proxy. A frame may hold many requests, and counts as one message.
void ServerLoop::on_frames(Client& client, ByteView bytes) {
  auto input = client.session->receive(bytes);
  if (!input) return lose(client, input.error());
  count(counters_.messages_in, input->frames);
  mark_dirty(client);
  in_batch_ = true;
  for (Request& request : input->requests) submit(client, std::move(request));
  in_batch_ = false;
  if (input->closed) lose(client, {ErrorCode::kPeerLost, "the proxy has ended"});
  if (!input->requests.empty()) return schedule_flush();
  flush();  // a new link, or a keepalive
}

// Schedules a flush for the end of this turn of the loop, or for the end of the gap after the previous flush if that is
// later. The gap saves frames, because requests of many proxies often release the same waiters.
void ServerLoop::schedule_flush() {
  if (std::exchange(flush_scheduled_, true)) return;
  loop_->at(next_flush_, [this] {
    const TimePoint begun = loop_->clock().now();
    const auto written = static_cast<int64_t>(flush());
    const TimePoint now = loop_->clock().now();
    flush_scheduled_ = false;
    const Duration gap =
        std::max(2 * (now - begun), has_many_proxies() ? (written - 1) * kFlushGapPerProxy : Duration{0});
    next_flush_ = now + std::clamp(gap, kMinFlushGap, kMaxFlushGap);
  });
}

bool ServerLoop::has_many_proxies() const { return sessions_.size() >= kManyProxies; }

void ServerLoop::coalesce() const {
  if (!flush_scheduled_ || !has_many_proxies()) return;
  std::this_thread::sleep_for(next_flush_ - loop_->clock().now());  // tidy: allow(sleep) until replies may leave
}

// False if there is no whole request yet, or if the client violated the protocol.
bool ServerLoop::take_request(Client& client) {
  Bytes& out = client.connection->out();
  const size_t answered = out.size();
  auto request = client.protocol->next(out);
  if (out.size() != answered) mark_dirty(client);
  count(counters_.bytes_out, out.size() - answered);
  if (!request) lose(client, request.error());
  if (!request || !*request) return false;
  count(counters_.messages_in);
  const bool finish_first = client.tcpstore ? must_finish_first((*request)->operation) : is_scan(**request);
  if (finish_first) client.unfinished = (*request)->id;
  submit(client, std::move(**request));
  // The request has no reply yet: another server carries it out, it waits until leases are given back, or it scans many
  // keys.
  if (client.unfinished != 0 && !client.lost) client.connection->pause(true);
  return true;
}

void ServerLoop::submit(Client& client, Request request) {
  count(counters_.operations[static_cast<uint8_t>(request.operation)]);
  current_client_ = &client;
  if (request.operation == StoreOperation::kStat && others_.stat) {
    Reply reply{client.id, request.id};
    put_stat(others_.stat(), reply);
    encode(reply);
  } else {
    backend_->submit(std::move(request), client.id);
  }
  current_client_ = nullptr;
}

Backend::Deliver ServerLoop::deliverer() {
  return [this](Replies&& replies) { distribute(std::move(replies)); };
}

void ServerLoop::distribute(Replies&& replies) {
  for (Reply& reply : replies) {
    const auto owner = static_cast<unsigned>(reply.client % count_);
    if (owner == index_) {
      encode(reply);
    } else {
      remote_replies_[owner].push_back(std::move(reply));
    }
  }
  if (!in_batch_) flush();
}

void ServerLoop::encode(const Reply& reply) {
  Client* client = current_client_;
  if (client == nullptr || client->id != reply.client) {
    const auto found = clients_.find(reply.client);
    if (found == clients_.end()) return;
    client = found->second.get();
  }
  if (client->lost) return;
  if (client->session) {
    client->session->end_grants(backend_->grants_ended());
    client->session->reply(reply);
    return mark_dirty(*client);
  }
  if (client->unfinished != 0 && client->unfinished == reply.id) {
    client->unfinished = 0;
    if (client != current_client_) client->connection->pause(false);
  }
  Bytes& out = client->connection->out();
  const size_t before = out.size();
  const auto encoded = client->protocol->encode(reply, out);
  if (!encoded) return lose(*client, encoded.error());
  if (out.size() == before) return;  // a request without a reply
  count(counters_.messages_out);
  count(counters_.bytes_out, out.size() - before);
  mark_dirty(*client);
}

void ServerLoop::mark_dirty(Client& client) {
  if (!std::exchange(client.dirty, true)) dirty_.push_back(&client);
}

// Sends the output of a batch of requests or replies: one write per client, one message per other loop. A proxy that
// does not want a frame yet gets it later. Returns the number of proxies that it wrote to.
size_t ServerLoop::flush() {
  const TimePoint now = loop_->clock().now();
  TimePoint earliest = kNever;
  size_t proxies = 0;
  std::vector<Client*> early;
  for (size_t i = 0; i < dirty_.size(); ++i) {  // a failed write may add to dirty_
    Client& client = *dirty_[i];
    if (client.session && !client.lost && now < client.next_frame) {
      early.push_back(&client);
      earliest = std::min(earliest, client.next_frame);
      continue;
    }
    client.dirty = false;
    if (client.session) {
      write_frames(client);
      ++proxies;
    }
    client.connection->flush();
  }
  dirty_.swap(early);
  if (earliest < paced_flush_) {
    paced_flush_ = earliest;
    loop_->at(earliest, [this] {
      paced_flush_ = kNever;
      schedule_flush();
    });
  }
  for (unsigned i = 0; i < count_; ++i) {
    if (!remote_replies_[i].empty()) others_.deliver(i, std::exchange(remote_replies_[i], {}));
  }
  return proxies;
}

void ServerLoop::write_frames(Client& client) {
  ServerSession& session = *client.session;
  session.end_grants(backend_->grants_ended());
  client.next_frame = loop_->clock().now() + session.min_interval();
  Bytes& out = client.connection->out();
  const size_t before = out.size();
  count(counters_.messages_out, session.write(out, proxies(), backend_->lease_left()));
  count(counters_.bytes_out, out.size() - before);
  if (session.linked() || session.unacknowledged() <= options_.max_reply_queue) return;
  lose(client, {ErrorCode::kResourceExhausted, "too many replies wait for its link"});
}

// Handles a lost connection. A known proxy keeps its session, because it may reconnect.
void ServerLoop::on_lost(Client& client, const Error& why) {
  if (!client.session || !client.session->known()) return lose(client, why);
  log(LogLevel::kDebug, fmt::format("store: the link to {} is lost: {}", client.peer, why.message));
  client.session->link_lost();
}

void ServerLoop::check_sessions() {
  std::vector<Client*> silent, over;  // two lists, because ending a session removes it from sessions_
  for (const auto& [id, client] : sessions_) {
    ServerSession& session = *client->session;
    const SessionExpiry::Expired expired = session.expired(proxies());
    // An earlier grant may still be on its way here from another loop, or may wait here for the link. end_grants()
    // removes such grants from the replies.
    if (expired.leases) session.end_grants(backend_->revoke(client->id));
    if (expired.link) silent.push_back(client);
    if (expired.session) over.push_back(client);
  }
  for (Client* client : silent) {
    client->connection->close();
    on_lost(*client, {ErrorCode::kTimeout, "the link was silent for too long"});
  }
  for (Client* client : over) lose(*client, {ErrorCode::kTimeout, "the proxy did not reconnect"});
  flush();
  loop_->after(kSessionCheckInterval, [this] { check_sessions(); });
}

void ServerLoop::lose(Client& client, const Error& why) {
  if (std::exchange(client.lost, true)) return;
  const bool usual = why.code == ErrorCode::kPeerLost;
  if (const LogLevel level = usual ? LogLevel::kDebug : LogLevel::kWarning; log_enabled(level)) {
    const std::string line = fmt::format("store: dropped client {}: {}", client.peer, why.message);
    if (client.tcpstore && !usual) unauthenticated_log_.warn(line);
    if (!client.tcpstore || usual) log(level, line);
  }
  client.connection->close();
  // A handler of the client's connection may be on the stack, so the client is destroyed later.
  if (closed_clients_.empty()) {
    loop_->post([this] {
      flush();  // dirty_ may hold pointers to closed clients
      closed_clients_.clear();
    });
  }
  closed_clients_.push_back(std::move(clients_.extract(client.id).mapped()));
  counters_.clients.store(clients_.size(), std::memory_order_relaxed);
  --load_;
  backend_->drop(client.id);  // before its leases end: their end may release its waits, which would then get new leases
  if (!client.session) return;
  sessions_.erase(client.session_id);
  backend_->serves_proxies(sessions_.size());
  if (const TimePoint end = client.session->leases_end(); end > loop_->clock().now()) {
    loop_->at(end, [this, id = client.id] { backend_->revoke(id); });
  } else {
    backend_->revoke(client.id);
  }
}

}  // namespace muster
