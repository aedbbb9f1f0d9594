#include "muster/store/server.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "muster/base/log.h"
#include "muster/store/backend.h"
#include "muster/store/channel.h"
#include "muster/store/connect.h"
#include "muster/store/dialect.h"

namespace muster {
namespace {

// Everything but stop_ belongs to the thread that drives the loop: start()'s caller first, then the server's own.
class Server : public StoreServer {
 public:
  Server(StoreServerOptions options, std::unique_ptr<Loop> loop)
      : options_(std::move(options)), loop_(std::move(loop)) {}

  ~Server() override {
    stop_ = true;
    loop_->wake();
    if (thread_.joinable()) thread_.join();
  }

  Result<> start(const Deadline& deadline) {
    for (const Address& address : options_.muster_listen) {
      MUSTER_ASSIGN(muster_addresses_.emplace_back(), listen(address, /*plain=*/false, {}));
    }
    for (const Address& address : options_.torch_listen) {
      MUSTER_ASSIGN(torch_addresses_.emplace_back(), listen(address, /*plain=*/true, {}));
    }
    MUSTER_TRY(connect_backend(deadline));
    thread_ = std::thread([this] {
      while (!stop_) loop_->run_once(Deadline::after(60s));
    });
    return {};
  }

  const std::vector<Address>& muster_addresses() const override { return muster_addresses_; }
  const std::vector<Address>& torch_addresses() const override { return torch_addresses_; }

  Result<Address> add_torch_listener(const Address& address, Key prefix) override {
    return on_loop<Result<Address>>([&] { return listen(address, /*plain=*/true, std::move(prefix)); });
  }

  void remove_torch_listener(const Address& address) override {
    on_loop<bool>([&] {
      const auto found = std::find_if(acceptors_.begin(), acceptors_.end(),
                                      [&](const auto& entry) { return entry.second->address() == address; });
      if (found == acceptors_.end()) return false;
      std::vector<ClientId> theirs;
      for (const auto& [id, client] : clients_) {
        if (client.listener == found->first) theirs.push_back(id);
      }
      acceptors_.erase(found);
      for (const ClientId id : theirs) lose(id, Error{ErrorCode::kPeerLost, "its listener was closed", kNoRank, {}});
      return true;
    });
  }

  StoreStat stat() const override {
    return const_cast<Server*>(this)->on_loop<StoreStat>([this] {
      StoreStat stat;
      stat.clients = clients_.size();
      return stat;
    });
  }

 private:
  using ListenerId = uint64_t;
  struct Client {
    std::string name;  // for the log
    ListenerId listener;
    std::unique_ptr<Dialect> dialect;
    std::unique_ptr<Channel> channel;
  };

  // Runs `task` on the server's thread and waits for what it returns.
  template <class T>
  T on_loop(std::function<T()> task) {
    std::promise<T> promise;
    auto future = promise.get_future();
    loop_->post([&] { promise.set_value(task()); });
    return future.get();
  }

  Result<Address> listen(const Address& address, bool plain, Key prefix) {
    Acceptor::Options options;
    options.plain = plain;
    if (!plain) options.credentials = options_.credentials;
    if (address.is_unix()) options.credentials.tls = nullptr;
    if (!plain) options.hello = to_bytes(kStoreHello);
    const ListenerId id = next_listener_++;
    MUSTER_ASSIGN(auto acceptor, Acceptor::create(*loop_, address, std::move(options),
                                                  [this, id, plain, prefix](Connection connection) {
                                                    admit(std::move(connection), plain, id, prefix);
                                                  }));
    const Address bound = acceptor->address();
    acceptors_.emplace(id, std::move(acceptor));
    return bound;
  }

  Result<> connect_backend(const Deadline& deadline) {
    const auto deliver = [this](Replies replies) { this->deliver(std::move(replies)); };
    if (options_.upstream.empty()) {
      backend_ = local_backend(deliver);
      return {};
    }
    UpstreamOptions upstream{options_.upstream, options_.credentials};
    MUSTER_ASSIGN(backend_, upstream_backend(*loop_, std::move(upstream), deadline, deliver));
    return {};
  }

  void admit(Connection connection, bool plain, ListenerId listener, const Key& prefix) {
    if (!plain && to_string(connection.hello) != kStoreHello) {
      log(LogLevel::kWarning,
          "store: refused " + connection.peer.to_string() + ", which wants something else than a store");
      return;
    }
    const ClientId id = next_client_++;
    Client& client = clients_[id];
    client.name = connection.peer.to_string();
    client.listener = listener;
    client.dialect = plain ? torch_dialect(prefix) : muster_dialect();
    client.channel = std::make_unique<Channel>(*loop_, std::move(connection.stream),
                                               Channel::Options{options_.max_reply_queue, options_.stall_timeout},
                                               Channel::Handlers{[this, id](ByteView bytes) { on_input(id, bytes); },
                                                                 [this, id](const Error& why) { lose(id, why); }});
    if (const auto started = client.channel->start(); !started) return lose(id, started.error());
    if (!connection.leftover.empty()) on_input(id, connection.leftover);
  }

  void on_input(ClientId id, ByteView bytes) {
    clients_.at(id).dialect->feed(bytes);
    in_batch_ = true;
    for (auto found = clients_.find(id); found != clients_.end(); found = clients_.find(id)) {
      Client& client = found->second;
      if (client.channel->over()) break;  // the rest waits until the client has read
      const size_t answered = client.channel->out().size();
      auto request = client.dialect->next(client.channel->out());
      if (client.channel->out().size() != answered) dirty_.insert(id);
      if (!request) lose(id, request.error());
      if (!request || !*request) break;
      backend_->submit(std::move(**request), id);
    }
    in_batch_ = false;
    flush();
  }

  void deliver(Replies replies) {
    for (const Reply& reply : replies) {
      const auto found = clients_.find(reply.client);
      if (found == clients_.end()) continue;
      Client& client = found->second;
      dirty_.insert(reply.client);
      if (const auto encoded = client.dialect->encode(reply, client.channel->out()); !encoded) {
        lose(reply.client, encoded.error());
      }
    }
    if (!in_batch_) flush();
  }

  // Sends what a batch of requests or replies has produced: one write per client.
  void flush() {
    const auto dirty = std::exchange(dirty_, {});
    for (const ClientId id : dirty) {
      if (const auto found = clients_.find(id); found != clients_.end()) found->second.channel->flush();
    }
  }

  void lose(ClientId id, const Error& why) {
    auto client = clients_.extract(id);
    if (client.empty()) return;
    const bool usual = why.code == ErrorCode::kPeerLost;
    log(usual ? LogLevel::kDebug : LogLevel::kWarning,
        fmt::format("store: dropped client {}: {}", client.mapped().name, why.message));
    client.mapped().channel->close();
    // We may be inside one of its calls.
    if (graveyard_.empty()) loop_->post([this] { graveyard_.clear(); });
    graveyard_.push_back(std::move(client.mapped()));
    backend_->drop(id);
  }

  const StoreServerOptions options_;
  const std::unique_ptr<Loop> loop_;
  std::vector<Address> muster_addresses_, torch_addresses_;
  ListenerId next_listener_ = 0;
  std::unordered_map<ListenerId, std::unique_ptr<Acceptor>> acceptors_;
  std::unordered_map<ClientId, Client> clients_;
  std::vector<Client> graveyard_;
  std::unordered_set<ClientId> dirty_;
  bool in_batch_ = false;
  ClientId next_client_ = 1;
  std::unique_ptr<Backend> backend_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<StoreServer>> StoreServer::start(StoreServerOptions options, const Deadline& deadline) {
  MUSTER_ASSIGN(auto loop, Loop::create());
  auto server = std::make_unique<Server>(std::move(options), std::move(loop));
  MUSTER_TRY(server->start(deadline));
  return server;
}

}  // namespace muster
