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

constexpr unsigned kMostThreads = 16;
constexpr unsigned kShards = 32;  // so that even as many threads seldom meet

unsigned thread_count(const StoreServerOptions& options) {
  if (!options.upstream.empty()) return 1;  // a proxy's work is its one link
  if (options.threads > 0) return options.threads;
  return std::clamp(std::thread::hardware_concurrency() / 2, 1U, kMostThreads);
}

// The first loop accepts and shakes hands, and gives each connection to a loop.
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
      MUSTER_ASSIGN(muster_addresses_.emplace_back(), listen(address, /*plain=*/false, {}));
    }
    for (const Address& address : options_.torch_listen) {
      MUSTER_ASSIGN(torch_addresses_.emplace_back(), listen(address, /*plain=*/true, {}));
    }
    if (!options_.upstream.empty()) {
      UpstreamOptions upstream{options_.upstream, options_.credentials};
      upstream.merge = options_.tiered;
      upstream.link_grace = options_.link_grace;
      upstream.session = options_.session;
      MUSTER_ASSIGN(auto backend, upstream_backend(first().loop(), std::move(upstream), deadline, first().deliverer()));
      first().set_backend(std::move(backend));
    }
    for (const auto& loop : loops_) loop->run();
    return {};
  }

  const std::vector<Address>& muster_addresses() const override { return muster_addresses_; }
  const std::vector<Address>& torch_addresses() const override { return torch_addresses_; }

  Result<Address> add_torch_listener(const Address& address, Key prefix) override {
    return on_first_loop([&] { return listen(address, /*plain=*/true, std::move(prefix)); });
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
      const ServerLoop::Options options{i,
                                        threads_,
                                        options_.max_reply_queue,
                                        options_.stall_timeout,
                                        options_.request_timeout,
                                        options_.link_grace,
                                        options_.lease_time};
      auto& added = loops_.emplace_back(std::make_unique<ServerLoop>(options, others, std::move(loop)));
      if (options_.upstream.empty()) added->set_backend(local_backend(state_, added->deliverer()));
    }
    return {};
  }

  // Runs `task` on the first loop's thread and waits for what it returns.
  template <class Task>
  std::invoke_result_t<Task> on_first_loop(Task task) {
    std::promise<std::invoke_result_t<Task>> promise;
    auto future = promise.get_future();
    first().loop().post([&] { promise.set_value(task()); });
    return future.get();
  }

  Result<Address> listen(const Address& address, bool plain, Key prefix) {
    Acceptor::Options options;
    options.plain = plain;
    if (!plain) options.credentials = options_.credentials;
    if (address.is_unix()) options.credentials.tls = nullptr;
    if (!plain) options.hello = to_bytes(kStoreHello);
    const ListenerId id = next_listener_++;
    const auto admit = [this, plain, id, prefix](Connection connection) {
      this->admit({std::move(connection), plain, id, prefix, {}});
    };
    MUSTER_ASSIGN(auto acceptor, Acceptor::create(first().loop(), address, std::move(options), admit));
    const Address bound = acceptor->address();
    acceptors_.emplace(id, std::move(acceptor));
    return bound;
  }

  void admit(ServerLoop::AcceptedConnection newcomer) {
    if (!newcomer.plain) newcomer.session = session_of_hello(newcomer.connection.hello);
    if (newcomer.session) return loop_of(*newcomer.session).admit(std::move(newcomer));
    if (!newcomer.plain && to_string(newcomer.connection.hello) != kStoreHello) {
      log(LogLevel::kWarning,
          "store: refused " + newcomer.connection.peer.to_string() + ", which wants something else than a store");
      return;
    }
    choose_loop().admit(std::move(newcomer));
  }

  // A session comes back to the loop where it was.
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
  // Of the first loop's thread, once it runs.
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
