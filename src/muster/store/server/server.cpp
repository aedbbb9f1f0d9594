#include "muster/store/server/server.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <map>
#include <thread>

#include "muster/base/log.h"
#include "muster/store/connect.h"
#include "muster/store/server/server_loop.h"

namespace muster {
namespace {

constexpr unsigned kMaxThreads = 16;
constexpr unsigned kShards = 32;  // enough that even kMaxThreads threads rarely need the same shard

unsigned thread_count(const StoreServerOptions& options) {
  if (!options.upstream.empty()) return 1;  // the one link of a proxy is its limit
  if (options.threads > 0) return options.threads;
  return std::clamp(std::thread::hardware_concurrency() / 2, 1U, kMaxThreads);
}

// The first loop accepts connections, does the handshake, and assigns each connection to a loop.
class Server : public StoreServer {
 public:
  explicit Server(StoreServerOptions options)
      : options_(std::move(options)), threads_(thread_count(options_)), state_(threads_ == 1 ? 1 : kShards) {}

  ~Server() override {
    for (const auto& loop : loops_) loop->stop();
  }

  Result<> start(const Deadline& deadline) {
    MUSTER_TRY(make_loops());
    for (const Address& address : options_.muster_listen) {
      MUSTER_ASSIGN(muster_addresses_.emplace_back(), listen(address, /*tcpstore=*/false, {}));
    }
    for (const Address& address : options_.torch_listen) {
      MUSTER_ASSIGN(torch_addresses_.emplace_back(), listen(address, /*tcpstore=*/true, {}));
    }
    if (!options_.upstream.empty()) {
      MUSTER_ASSIGN(auto backend, upstream_backend(first().loop(), options_, deadline, first().deliverer()));
      first().set_backend(std::move(backend));
    }
    for (const auto& loop : loops_) loop->run();
    return {};
  }

  const std::vector<Address>& muster_addresses() const override { return muster_addresses_; }
  const std::vector<Address>& torch_addresses() const override { return torch_addresses_; }

  Result<Address> add_torch_listener(const Address& address, Key prefix) override {
    return on_first_loop([&] { return listen(address, /*tcpstore=*/true, std::move(prefix)); });
  }

  void remove_torch_listener(const Address& address) override {
    on_first_loop([&] {
      const auto found = std::find_if(acceptors_.begin(), acceptors_.end(),
                                      [&](const auto& entry) { return entry.second->address() == address; });
      if (found == acceptors_.end()) return false;
      const ListenerId id = found->first;
      acceptors_.erase(found);
      for (const auto& loop : loops_) loop->close_clients_of(id);
      return true;
    });
  }

  StoreStat stat() const override {
    StoreStat stat = state_.stat();
    for (const auto& loop : loops_) loop->add_to(stat);
    stat.uptime_seconds = std::chrono::duration<double>(steady_clock().now() - started_).count();
    return stat;
  }

 private:
  ServerLoop& first() { return *loops_.front(); }

  Result<> make_loops() {
    ServerLoop::Others others;
    others.deliver = [this](unsigned index, Replies replies) { loops_[index]->deliver(std::move(replies)); };
    if (options_.upstream.empty()) others.stat = [this] { return stat(); };
    for (unsigned i = 0; i < threads_; ++i) {
      MUSTER_ASSIGN(auto loop, Loop::create());
      auto& added = loops_.emplace_back(std::make_unique<ServerLoop>(options_, i, threads_, others, std::move(loop)));
      if (options_.upstream.empty()) added->set_backend(local_backend(state_, added->loop(), added->deliverer()));
    }
    return {};
  }

  // Runs `task` on the first loop's thread and returns its result.
  template <class Task>
  std::invoke_result_t<Task> on_first_loop(Task task) {
    std::promise<std::invoke_result_t<Task>> promise;
    auto future = promise.get_future();
    first().loop().post([&] { promise.set_value(task()); });
    return future.get();
  }

  Result<Address> listen(const Address& address, bool tcpstore, Key prefix) {
    Acceptor::Options options;
    options.plain = tcpstore;
    if (!tcpstore) options.credentials = options_.credentials;
    if (address.is_unix()) options.credentials.tls = nullptr;
    if (!tcpstore) options.hello = to_bytes(kStoreHello);
    const ListenerId id = next_listener_++;
    const auto admit = [this, tcpstore, id, prefix](Connection connection) {
      this->admit({std::move(connection), tcpstore, id, prefix, {}});
    };
    MUSTER_ASSIGN(auto acceptor, Acceptor::create(first().loop(), address, std::move(options), admit));
    const Address bound = acceptor->address();
    acceptors_.emplace(id, std::move(acceptor));
    return bound;
  }

  void admit(ServerLoop::AcceptedConnection accepted) {
    if (!accepted.tcpstore) accepted.session = session_of_hello(accepted.connection.hello);
    if (accepted.session) return loop_of(*accepted.session).admit(std::move(accepted));
    if (!accepted.tcpstore && to_string(accepted.connection.hello) != kStoreHello) {
      log(LogLevel::kWarning,
          "store: refused " + accepted.connection.peer.to_string() + ": it is no client of a store");
      return;
    }
    choose_loop().admit(std::move(accepted));
  }

  // All links of a session go to the same loop, because that loop holds the session's state.
  ServerLoop& loop_of(const SessionId& id) {
    size_t hash = 0;
    std::memcpy(&hash, id.data(), sizeof hash);
    return *loops_[hash % loops_.size()];
  }

  ServerLoop& choose_loop() {
    for (const auto& loop : loops_) {
      if (loop->load() < options_.few_clients) return *loop;
    }
    return **std::min_element(loops_.begin(), loops_.end(),
                              [](const auto& a, const auto& b) { return a->load() < b->load(); });
  }

  const StoreServerOptions options_;
  const unsigned threads_;
  const TimePoint started_ = steady_clock().now();
  StoreState state_;
  std::vector<Address> muster_addresses_, torch_addresses_;
  std::vector<std::unique_ptr<ServerLoop>> loops_;
  // Once the first loop runs, only its thread uses these members.
  ListenerId next_listener_ = 0;
  std::map<ListenerId, std::unique_ptr<Acceptor>> acceptors_;
};

}  // namespace

Result<std::unique_ptr<StoreServer>> StoreServer::start(StoreServerOptions options, const Deadline& deadline) {
  auto server = std::make_unique<Server>(std::move(options));
  MUSTER_TRY(server->start(deadline));
  return server;
}

}  // namespace muster
