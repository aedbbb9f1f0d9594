#include "muster/store/server_loop.h"

#include <fmt/format.h>
#include <pthread.h>
#include <time.h>

#include "muster/base/log.h"
#include "muster/store/channel.h"
#include "muster/store/dialect.h"

namespace muster {
namespace {

void count(std::atomic<uint64_t>& counter, uint64_t more = 1) {
  counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

double cpu_seconds(std::thread::native_handle_type thread) {
  clockid_t clock;
  timespec used{};
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace

struct ServerLoop::Client {
  ClientId id;
  ListenerId listener;
  Address peer;  // for the log
  std::unique_ptr<Dialect> dialect;
  std::optional<Channel> channel;
  bool dirty = false;
  bool lost = false;
};

ServerLoop::ServerLoop(Options options, Others others, std::unique_ptr<Loop> loop)
    : options_(options),
      others_(std::move(others)),
      loop_(std::move(loop)),
      abroad_(options.count),
      next_client_(options.count + options.index) {}

ServerLoop::~ServerLoop() { stop(); }

void ServerLoop::run() {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), fmt::format("store {}", options_.index).c_str());
    // It is woken when there is anything to do, stopping included.
    const Deadline never = Deadline::after(Duration::max());
    while (!stop_) loop_->run_once(never);
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

void ServerLoop::admit(Newcomer newcomer) {
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
  for (Newcomer& newcomer : taken.newcomers) welcome(std::move(newcomer));
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
    stat.operations_by_kind[name(static_cast<Operation>(kind))] += count;
  }
  stat.clients += counters_.clients;
  stat.bytes_in += counters_.bytes_in;
  stat.bytes_out += counters_.bytes_out;
  stat.messages_in += counters_.messages_in;
  stat.messages_out += counters_.messages_out;
  stat.cpu_seconds += cpu_seconds(const_cast<std::thread&>(thread_).native_handle());
  ++stat.threads;
}

// ---- on the loop's thread

void ServerLoop::welcome(Newcomer newcomer) {
  const ClientId id = next_client_;
  next_client_ += options_.count;
  auto [entry, fresh] = clients_.emplace(id, std::make_unique<Client>());
  Client& client = *entry->second;
  client.id = id;
  client.listener = newcomer.listener;
  client.peer = newcomer.connection.peer;
  client.dialect = newcomer.plain ? torch_dialect(std::move(newcomer.prefix)) : muster_dialect();
  client.channel.emplace(*loop_, std::move(newcomer.connection.stream),
                         Channel::Options{options_.max_reply_queue, options_.stall_timeout},
                         Channel::Handlers{[this, &client](ByteView bytes) { on_input(client, bytes); },
                                           [this, &client](const Error& why) { lose(client, why); }});
  count(counters_.clients);
  if (const auto started = client.channel->start(); !started) return lose(client, started.error());
  if (!newcomer.connection.leftover.empty()) on_input(client, newcomer.connection.leftover);
}

void ServerLoop::on_input(Client& client, ByteView bytes) {
  count(counters_.bytes_in, bytes.size());
  client.dialect->feed(bytes);
  in_batch_ = true;
  while (!client.lost && !client.channel->over() && take_request(client)) continue;  // the rest waits for the client
  in_batch_ = false;
  flush();
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
  submit(client, std::move(**request));
  return true;
}

void ServerLoop::submit(Client& client, Request request) {
  count(counters_.messages_in);
  count(counters_.operations[static_cast<uint8_t>(request.operation)]);
  speaker_ = &client;
  if (request.operation == Operation::kStat && others_.stat) {
    Reply reply{client.id, request.id};
    put_stat(others_.stat(), reply);
    encode(reply);
  } else {
    backend_->submit(std::move(request), client.id);
  }
  speaker_ = nullptr;
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
      abroad_[owner].push_back(std::move(reply));
    }
  }
  if (!in_batch_) flush();
}

void ServerLoop::encode(const Reply& reply) {
  Client* client = speaker_;
  if (client == nullptr || client->id != reply.client) {
    const auto found = clients_.find(reply.client);
    if (found == clients_.end()) return;
    client = found->second.get();
  }
  if (client->lost) return;
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
void ServerLoop::flush() {
  for (size_t i = 0; i < dirty_.size(); ++i) {  // a write that fails may add to it
    dirty_[i]->dirty = false;
    dirty_[i]->channel->flush();
  }
  dirty_.clear();
  for (unsigned i = 0; i < options_.count; ++i) {
    if (!abroad_[i].empty()) others_.deliver(i, std::exchange(abroad_[i], {}));
  }
}

void ServerLoop::lose(Client& client, const Error& why) {
  if (std::exchange(client.lost, true)) return;
  const bool usual = why.code == ErrorCode::kPeerLost;
  if (const LogLevel level = usual ? LogLevel::kDebug : LogLevel::kWarning; log_enabled(level)) {
    log(level, fmt::format("store: dropped client {}: {}", client.peer.to_string(), why.message));
  }
  client.channel->close();
  // We may be inside one of its calls.
  if (graveyard_.empty()) loop_->post([this] { graveyard_.clear(); });
  auto gone = clients_.extract(client.id);
  graveyard_.push_back(std::move(gone.mapped()));
  counters_.clients.store(clients_.size(), std::memory_order_relaxed);
  --load_;
  backend_->drop(client.id);
}

}  // namespace muster
