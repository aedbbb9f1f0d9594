#include "muster/store/server/server_loop.h"

#include <fmt/format.h>
#include <pthread.h>

#include "muster/base/log.h"
#include "muster/store/protocol/protocol.h"
#include "muster/store/server/buffered_connection.h"
#include "muster/store/server/server_session.h"
#include "muster/store/state/lease.h"

namespace muster {
namespace {

// PyTorch's protocol has no numbers: replies come in the order of the requests, and what gets none is taken for done
// when it is sent. Only a wait is overtaken, by the word that ends it.
bool goes_in_turn(StoreOperation operation) {
  return operation != StoreOperation::kWait && operation != StoreOperation::kBarrier &&
         operation != StoreOperation::kCancel;
}

// Between two rounds of sending to proxies, twice as long as the last one took: replies gather meanwhile.
constexpr Duration kShortestFlushGap = 100us, kLongestFlushGap = 4ms;
// A crowd of proxies makes it longer the more of them ask at the same time, and the thread sleeps meanwhile: frames
// would wake it one by one, for replies that wait anyhow.
constexpr size_t kCrowd = 8;
constexpr Duration kFlushGapPerProxy = 300us;
constexpr Duration kSessionTick = 500ms;
constexpr Duration kSilentLink = 20s;  // or the grace of a link; three signs of life that did not come, if longer

void count(std::atomic<uint64_t>& counter, uint64_t more = 1) {
  counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

// How long a lease may be used by a clock that does not run as ours does.
Duration with_clocks_apart(Duration lease) { return lease * 5 / 4; }

// Zero where the thread has not begun, or has ended.
double seconds_of(std::optional<clockid_t> clock) {
  timespec used{};
  if (!clock || clock_gettime(*clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace

// A client that is a proxy: it outlives its connections.
struct ProxyClient {
  SessionId id{};
  ServerSession host;
  TimePoint since{};                  // when the link was lost
  TimePoint due{};                    // it wants no frame before
  TimePoint leased_until{INT64_MIN};  // the longest that one was granted for
  bool ended = false;                 // the proxy is no more
};

struct ServerLoop::Client {
  ClientId id;
  ListenerId listener;
  Address peer;                       // for the log
  std::unique_ptr<Protocol> dialect;  // or
  std::unique_ptr<ProxyClient> tier;
  std::optional<BufferedConnection> channel;
  bool plain = false;     // speaks PyTorch's protocol
  RequestId in_hand = 0;  // its request that must be done before the next is looked at
  bool dirty = false;
  bool lost = false;
  bool expected = false;  // to go on with its request
  TimePoint heard{};      // when it last did
};

ServerLoop::ServerLoop(Options options, Others others, std::unique_ptr<Loop> loop)
    : options_(options),
      others_(std::move(others)),
      loop_(std::move(loop)),
      remote_replies_(options.count),
      strangers_(loop_->clock()),
      next_client_(options.count + options.index) {}

ServerLoop::~ServerLoop() { stop(); }

void ServerLoop::run() {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), fmt::format("store {}", options_.index).c_str());
    clockid_t clock;
    if (pthread_getcpuclockid(pthread_self(), &clock) == 0) clock_ = clock;
    // It is woken when there is anything to do, stopping included.
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

// ---- what other threads ask for

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

void ServerLoop::admit(AcceptedConnection newcomer) {
  ++load_;
  post([&](Inbox& inbox) { inbox.newcomers.push_back(std::move(newcomer)); });
}

void ServerLoop::deliver(Replies replies) {
  post([&](Inbox& inbox) {
    if (inbox.replies.empty()) return inbox.replies.swap(replies);
    inbox.replies.insert(inbox.replies.end(), std::make_move_iterator(replies.begin()),
                         std::make_move_iterator(replies.end()));
  });
}

void ServerLoop::close_clients_of(ListenerId listener) {
  post([&](Inbox& inbox) { inbox.closed.push_back(listener); });
}

void ServerLoop::take_inbox() {
  Inbox taken;
  {
    const std::lock_guard lock(mutex_);
    std::swap(taken, inbox_);
  }
  for (AcceptedConnection& newcomer : taken.newcomers) add_client(std::move(newcomer));
  for (const Reply& reply : taken.replies) encode(reply);
  for (const ListenerId listener : taken.closed) {
    std::vector<Client*> theirs;
    for (const auto& [id, client] : clients_) {
      if (client->listener == listener) theirs.push_back(client.get());
    }
    for (Client* client : theirs) lose(*client, {ErrorCode::kPeerLost, "its listener was closed", kNoRank, {}});
  }
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
  stat.cpu_seconds += seconds_of(clock_);
  ++stat.threads;
}

// ---- on the loop's thread

ServerLoop::Client& ServerLoop::new_client() {
  const ClientId id = next_client_;
  next_client_ += options_.count;
  Client& client = *clients_.emplace(id, std::make_unique<Client>()).first->second;
  client.id = id;
  count(counters_.clients);
  return client;
}

// The proxy's client as it was left, or a new one.
ServerLoop::Client& ServerLoop::client_of(const SessionId& session) {
  if (!std::exchange(looks_after_, true)) check_sessions();
  Client*& client = sessions_[session];
  if (client != nullptr) {
    client->channel->close();  // it may have noticed before us that this one is broken
    --load_;
  } else {
    client = &new_client();
    client->tier = std::make_unique<ProxyClient>();
    client->tier->id = session;
    backend_->serves_proxies(sessions_.size());
  }
  client->tier->host.link_up(loop_->clock().now());
  return *client;
}

void ServerLoop::add_client(AcceptedConnection newcomer) {
  Client& client = newcomer.session ? client_of(*newcomer.session) : new_client();
  client.listener = newcomer.listener;
  client.peer = newcomer.connection.peer;
  client.plain = newcomer.plain;
  if (!client.tier) client.dialect = newcomer.plain ? torch_dialect(std::move(newcomer.prefix)) : muster_dialect();
  client.channel.emplace(*loop_, std::move(newcomer.connection.stream),
                         BufferedConnection::Options{options_.max_reply_queue, options_.stall_timeout},
                         BufferedConnection::Handlers{[this, &client](ByteView bytes) { on_input(client, bytes); },
                                                      [this, &client](const Error& why) { on_lost(client, why); }});
  if (const auto started = client.channel->start(); !started) return lose(client, started.error());
  if (client.plain || !newcomer.connection.leftover.empty()) on_input(client, newcomer.connection.leftover);
}

void ServerLoop::on_input(Client& client, ByteView bytes) {
  count(counters_.bytes_in, bytes.size());
  if (client.tier) return on_frames(client, bytes);
  client.dialect->feed(bytes);
  in_batch_ = true;
  while (!client.lost && !client.channel->over() && take_request(client)) continue;  // the rest waits for the client
  in_batch_ = false;
  arm_timeout(client);
  flush();
}

// Who stops in the middle of a request must go on in time.
void ServerLoop::arm_timeout(Client& client) {
  if (client.lost || !client.dialect->midway()) return;
  client.heard = loop_->clock().now();
  if (std::exchange(client.expected, true)) return;
  expected_.push_back({client.heard, client.id});
  if (expected_.size() == 1) loop_->at(client.heard + options_.request_timeout, [this] { look_for_the_rest(); });
}

void ServerLoop::look_for_the_rest() {
  const TimePoint now = loop_->clock().now();
  const auto too_long = [&](TimePoint since) { return now - since >= options_.request_timeout; };
  while (!expected_.empty() && too_long(expected_.front().first)) {
    const auto found = clients_.find(expected_.front().second);
    expected_.pop_front();
    if (found == clients_.end()) continue;
    Client& client = *found->second;
    client.expected = false;
    if (client.channel->over() || !client.dialect->midway()) continue;  // looked at again with its next input
    if (too_long(client.heard)) {
      lose(client, {ErrorCode::kTimeout, "it stopped in the middle of a request", kNoRank, {}});
    } else {
      client.expected = true;
      expected_.push_back({now, client.id});
    }
  }
  if (expected_.empty()) return;
  loop_->at(expected_.front().first + options_.request_timeout, [this] { look_for_the_rest(); });
}

// A proxy's frames, each of which may hold many requests and counts as one message.
void ServerLoop::on_frames(Client& client, ByteView bytes) {
  auto input = client.tier->host.receive(bytes, loop_->clock().now());
  if (!input) return lose(client, input.error());
  count(counters_.messages_in, input->frames);
  mark_dirty(client);
  in_batch_ = true;
  for (Request& request : input->requests) submit(client, std::move(request));
  in_batch_ = false;
  client.tier->ended = input->closed;
  if (input->closed) lose(client, {ErrorCode::kPeerLost, "the proxy has ended", kNoRank, {}});
  if (!input->requests.empty()) return flush_soon();
  flush();  // a new link, or a sign of life
}

// When all that came in this turn was carried out, or a little later where proxies ask all the time: the requests of
// many of them release the same others.
void ServerLoop::flush_soon() {
  if (std::exchange(flushes_soon_, true)) return;
  loop_->at(next_flush_, [this] {
    const TimePoint begun = loop_->clock().now();
    const auto written = static_cast<int64_t>(flush());
    const TimePoint now = loop_->clock().now();
    flushes_soon_ = false;
    const Duration gap = std::max(2 * (now - begun), is_crowded() ? (written - 1) * kFlushGapPerProxy : Duration{0});
    next_flush_ = now + std::clamp(gap, kShortestFlushGap, kLongestFlushGap);
  });
}

bool ServerLoop::is_crowded() const { return sessions_.size() >= kCrowd; }

void ServerLoop::coalesce() const {
  if (!flushes_soon_ || !is_crowded()) return;
  std::this_thread::sleep_for(next_flush_ - loop_->clock().now());  // tidy: allow(sleep) until replies may leave
}

// False when there is none left, or the client broke the protocol.
bool ServerLoop::take_request(Client& client) {
  Bytes& out = client.channel->out();
  const size_t answered = out.size();
  auto request = client.dialect->next(out);
  if (out.size() != answered) mark_dirty(client);
  count(counters_.bytes_out, out.size() - answered);
  if (!request) lose(client, request.error());
  if (!request || !*request) return false;
  count(counters_.messages_in);
  if (client.plain && goes_in_turn((*request)->operation)) client.in_hand = (*request)->id;
  submit(client, std::move(**request));
  // It may be on its way to another server, or held back until leases are.
  if (client.in_hand != 0 && !client.lost) client.channel->pause(true);
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
    const auto owner = static_cast<unsigned>(reply.client % options_.count);
    if (owner == options_.index) {
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
  if (client->tier) {
    client->tier->host.end_grants(backend_->grants_ended());
    client->tier->host.reply(reply);
    return mark_dirty(*client);
  }
  if (client->in_hand != 0 && client->in_hand == reply.id) {
    client->in_hand = 0;
    if (client != current_client_) client->channel->pause(false);
  }
  Bytes& out = client->channel->out();
  const size_t before = out.size();
  const auto encoded = client->dialect->encode(reply, out);
  if (!encoded) return lose(*client, encoded.error());
  if (out.size() == before) return;  // a request without a reply
  count(counters_.messages_out);
  count(counters_.bytes_out, out.size() - before);
  mark_dirty(*client);
}

void ServerLoop::mark_dirty(Client& client) {
  if (!std::exchange(client.dirty, true)) dirty_.push_back(&client);
}

// Sends what a batch of requests or replies has produced: one write per client, one message per other loop.
// Returns to how many proxies it wrote; those that want a pause first are held back.
size_t ServerLoop::flush() {
  const TimePoint now = loop_->clock().now();
  TimePoint earliest = kNever;
  size_t proxies = 0;
  std::vector<Client*> early;
  for (size_t i = 0; i < dirty_.size(); ++i) {  // a write that fails may add to it
    Client& client = *dirty_[i];
    if (client.tier && !client.lost && now < client.tier->due) {
      early.push_back(&client);
      earliest = std::min(earliest, client.tier->due);
      continue;
    }
    client.dirty = false;
    if (client.tier) {
      write_frames(client);
      ++proxies;
    }
    client.channel->flush();
  }
  dirty_.swap(early);
  if (earliest < held_until_) {
    held_until_ = earliest;
    loop_->at(earliest, [this] {
      held_until_ = kNever;
      flush_soon();
    });
  }
  for (unsigned i = 0; i < options_.count; ++i) {
    if (!remote_replies_[i].empty()) others_.deliver(i, std::exchange(remote_replies_[i], {}));
  }
  return proxies;
}

void ServerLoop::write_frames(Client& client) {
  ProxyClient& tier = *client.tier;
  const TimePoint now = loop_->clock().now();
  const int64_t growth = beat_growth(proxies());
  const Duration lease = std::min(options_.lease_time * growth, backend_->lease_left());
  tier.host.end_grants(backend_->grants_ended());
  tier.due = now + tier.host.pace();
  tier.leased_until = std::max(tier.leased_until, tier.host.heard() + with_clocks_apart(lease));
  Bytes& out = client.channel->out();
  const size_t before = out.size();
  count(counters_.messages_out, tier.host.write(out, lease, kBeat * growth));
  count(counters_.bytes_out, out.size() - before);
  if (tier.host.linked() || tier.host.unacknowledged() <= options_.max_reply_queue) return;
  lose(client, {ErrorCode::kResourceExhausted, "too many replies wait for its link", kNoRank, {}});
}

// A proxy may come back.
void ServerLoop::on_lost(Client& client, const Error& why) {
  if (!client.tier || !client.tier->host.known()) return lose(client, why);
  log(LogLevel::kDebug, fmt::format("store: the link to {} is lost: {}", client.peer.to_string(), why.message));
  client.tier->since = loop_->clock().now();
  client.tier->host.link_lost();
}

void ServerLoop::check_sessions() {
  const TimePoint now = loop_->clock().now();
  const Duration silence = std::max(std::min(kSilentLink, options_.link_grace), 3 * kBeat * beat_growth(proxies()));
  std::vector<Client*> silent, over;  // ending a session takes it out of sessions_
  for (const auto& [id, client] : sessions_) {
    ProxyClient& tier = *client->tier;
    // It may have been granted some since without the right to use them, hence also where none was good for longer.
    if (now > std::max(tier.leased_until, tier.host.heard() + with_clocks_apart(options_.lease_time))) {
      // A grant from before may still be on its way here from another loop, or wait here for the link.
      tier.host.end_grants(backend_->revoke(client->id));
    }
    if (tier.host.linked() && now - tier.host.heard() > silence) silent.push_back(client);
    if (!tier.host.linked() && now - tier.since > options_.link_grace) over.push_back(client);
  }
  for (Client* client : silent) {
    client->channel->close();
    on_lost(*client, {ErrorCode::kTimeout, "nothing came over it", kNoRank, {}});
  }
  for (Client* client : over) lose(*client, {ErrorCode::kTimeout, "the proxy did not come back", kNoRank, {}});
  flush();
  loop_->after(kSessionTick, [this] { check_sessions(); });
}

void ServerLoop::bury() {
  flush();  // which may still know them
  closed_clients_.clear();
}

void ServerLoop::lose(Client& client, const Error& why) {
  if (std::exchange(client.lost, true)) return;
  const bool usual = why.code == ErrorCode::kPeerLost;
  if (const LogLevel level = usual ? LogLevel::kDebug : LogLevel::kWarning; log_enabled(level)) {
    const std::string line = fmt::format("store: dropped client {}: {}", client.peer.to_string(), why.message);
    if (client.plain && !usual) strangers_.warn(line);
    if (!client.plain || usual) log(level, line);
  }
  client.channel->close();
  // We may be inside one of its calls.
  if (closed_clients_.empty()) loop_->post([this] { bury(); });
  auto gone = clients_.extract(client.id);
  closed_clients_.push_back(std::move(gone.mapped()));
  counters_.clients.store(clients_.size(), std::memory_order_relaxed);
  --load_;
  backend_->drop(client.id);  // first: what waits for its leases may release its waits, which would be leased again
  if (!client.tier) return;
  sessions_.erase(client.tier->id);
  backend_->serves_proxies(sessions_.size());
  end_leases(client);
}

// A proxy that is no more uses none. One that was given up may live, and what it passed on to others is theirs.
void ServerLoop::end_leases(const Client& client) {
  const ProxyClient& tier = *client.tier;
  if (tier.ended && !tier.host.served_proxies()) {
    backend_->revoke(client.id);
    return;
  }
  const TimePoint until = std::max(tier.leased_until, loop_->clock().now());
  loop_->at(until, [this, id = client.id] { backend_->revoke(id); });
}

}  // namespace muster
