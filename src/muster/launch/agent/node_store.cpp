#include "muster/launch/agent/node_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "muster/io/address.h"
#include "muster/io/connect/handshake.h"
#include "muster/io/connect/tls.h"
#include "muster/io/outward_address.h"
#include "muster/launch/rendezvous/rendezvous_messages.h"
#include "muster/store/proxy/proxy.h"
#include "muster/store/url.h"

namespace muster {
namespace {

constexpr Duration kNoticeDelay = std::chrono::seconds(3);         // waiting time before the user is notified
constexpr Duration kSlice = std::chrono::seconds(1);               // longest wait between two checks for cancellation
constexpr Duration kPollInterval = std::chrono::milliseconds(50);  // between checks for cancellation
constexpr Duration kMaxSlice = std::chrono::seconds(8);  // the same, for an external store that may have several hosts
constexpr Duration kParentStartTime = std::chrono::seconds(5);  // for the parent proxy to listen
constexpr Duration kParentAnswerTime = std::chrono::seconds(2);

// A name lookup. The resolving thread and the waiting thread share it.
struct Lookup {
  std::mutex mutex;
  std::condition_variable done;
  std::optional<Result<std::vector<Address>>> found;
};

bool is_unreachable(const Error& error) {
  return error.code == ErrorCode::kTimeout || error.code == ErrorCode::kUnavailable ||
         error.code == ErrorCode::kPeerLost;
}

// "redis://user:word@host:6379/0" and "etcd://host:2379,other:2379/x" -> "host".
std::string host_of(const std::string& url) {
  const auto parsed = Url::parse(url, 1);
  return parsed && parsed->scheme != "file" && !parsed->hosts.empty() ? parsed->hosts.front().host : "";
}

/// Opens a NodeStore. It has many functions, because there are three ways to the root (a single node, an address, an
/// external store), and on two of them a node may find the root or become it.
class Bootstrap {
 public:
  Bootstrap(const RunOptions& options, const NodeStoreEvents& events, LastRoot last)
      : options_(options),
        events_(events),
        last_(std::move(last)),
        root_is_fixed_(!last_.url.empty() && !last_.leaves &&
                       (options.rdzv_url.empty() || options.rdzv_url.starts_with("file:"))),
        deadline_(Deadline::after(root_is_fixed_ || last_.leaves ? options.heartbeat_timeout : options.timeout)) {}

  Result<NodeStore> open() {
    node_.secret = options_.secret;
    MUSTER_TRY(options_.nnodes_max == 1    ? as_single_node()
               : last_.leaves              ? by_last_root()
               : options_.rdzv_url.empty() ? by_address()
                                           : by_external_store());
    if (options_.nnodes_max > 1 && node_.root && node_.secret.empty())
      events_.notice(
          fmt::format("no secret was given, so anyone who can reach {} can join this job; set MUSTER_SECRET to the "
                      "same hex digits on all nodes, or use --secret-file",
                      node_.root_url));
    return std::move(node_);
  }

 private:
  Result<> as_single_node() {
    if (!options_.master_addr.empty())
      MUSTER_TRY(resolve_one("--master-addr", options_.master_addr, options_.master_port));
    if (node_.secret.empty()) node_.secret = generate_secret();
    node_.root = true;
    return start_server(server_options(), Deadline::after(kServerStartTime));
  }

  Result<> by_address() {
    MUSTER_ASSIGN(node_.tls, TlsContext::from_environment());
    MUSTER_ASSIGN(const Address master, root_is_fixed_
                                            ? address_of(last_.url)
                                            : resolve_with_retries(options_.master_addr, options_.master_port));
    MUSTER_TRY(find_interface(master));
    const bool has_address = options_.node_rank ? *options_.node_rank == 0 : is_local(master);
    const bool may_serve = options_.is_host.value_or(has_address) && !root_is_fixed_;
    if (may_serve) {
      const auto started = start_fixed_root(master);
      const bool somebody_is = !started && started.error().code == ErrorCode::kUnavailable && !options_.node_rank;
      if (started || !somebody_is) return started;
    }
    return await_root(master, may_serve);
  }

  // Any node may be the root. The node that gets the claim serves at a free port, and writes the address to the claim.
  Result<> by_external_store() {
    MUSTER_ASSIGN(node_.tls, TlsContext::from_environment());
    const std::string host = host_of(options_.rdzv_url);
    MUSTER_ASSIGN(const Address towards, host.empty() ? outward_address() : resolve_one("--rdzv-endpoint", host, 1));
    auto external_store = open_external_store(options_.rdzv_url);
    if (!external_store) return fail(external_store.error().code, "--rdzv-endpoint: " + external_store.error().message);
    node_.external_store = std::move(*external_store);
    node_.root_moves =
        !options_.rdzv_url.starts_with("file:");  // a file store has no claims, so it cannot show the loss of a root
    return search(towards, options_.rdzv_url);
  }

  // The store of a root that leaves shows where the next one is, as an external store does.
  Result<> by_last_root() {
    MUSTER_ASSIGN(node_.tls, TlsContext::from_environment());
    MUSTER_ASSIGN(const Address towards, address_of(last_.url));
    auto last_store = open_external_store(last_.url);
    if (!last_store)
      return fail(last_store.error().code, fmt::format("the root at {} has ended before this node has found the next "
                                                       "one: {}",
                                                       last_.url, last_store.error().message));
    node_.last_root = std::move(*last_store);
    return search(towards, last_.url);
  }

  Result<> search(const Address& towards, const std::string& url) {
    MUSTER_TRY(find_interface(towards));
    Error last{ErrorCode::kTimeout, "the timeout passed", kNoRank, ""};
    while (!cancelled() && !deadline_.passed()) {
      MUSTER_ASSIGN(const std::string root, claimed_root());
      if (root.empty() && root_is_fixed_) break;
      const auto done = root.empty() ? become_root(towards) : start_proxy(root, slice());
      if (done) return {};
      if (!is_unreachable(done.error()) && done.error().code != ErrorCode::kAlreadyExists) return done;
      last = done.error();
    }
    if (cancelled()) return stopped();
    return fail(ErrorCode::kTimeout, fmt::format("no root of the job was found through {} within {:g} s ({})",
                                                 without_password(url), seconds(options_.timeout), last.message));
  }

  // Retries after a timeout, because a silent store may only be slow. Other errors are final.
  Result<std::unique_ptr<Store>> open_external_store(const std::string& url) {
    for (Duration patience = kSlice;; patience = std::min(2 * patience, kMaxSlice)) {
      auto external_store = open_store(url, options_.secret, slice(patience));
      const bool silent = !external_store && external_store.error().code == ErrorCode::kTimeout;
      if (!silent || deadline_.passed()) return external_store;
      if (cancelled()) return stopped();
    }
  }

  // getaddrinfo() may take many seconds if no name server answers, and it cannot be cancelled. So a detached thread
  // calls it. This thread owns all its data, and it is left behind if this node must stop.
  Result<Address> resolve_one(const char* option, const std::string& host, uint16_t port) const {
    const auto lookup = std::make_shared<Lookup>();
    // tidy: allow(detach) getaddrinfo() cannot be cancelled; the thread owns its data
    std::thread([lookup, host, port] {
      auto found = resolve(host, port);
      const std::lock_guard lock(lookup->mutex);
      lookup->found = std::move(found);
      lookup->done.notify_all();
    }).detach();
    std::unique_lock lock(lookup->mutex);
    while (!lookup->found && !cancelled()) lookup->done.wait_for(lock, kPollInterval);
    if (!lookup->found) return stopped();
    const auto& found = *lookup->found;
    if (!found) return fail(found.error().code, fmt::format("{}: {}", option, found.error().message));
    return found->front();
  }

  // A name may become known only some time after its host has started, for example the name of a Kubernetes service.
  Result<Address> resolve_with_retries(const std::string& host, uint16_t port) {
    const Deadline quiet = Deadline::after(kNoticeDelay);
    bool notified = false;
    while (true) {
      auto found = resolve_one("--master-addr", host, port);
      const bool may_retry = !deadline_.passed() && !cancelled();
      if (found || !may_retry) return found;
      if (quiet.passed() && !std::exchange(notified, true))
        events_.notice(fmt::format("{} (retrying for {:g} s)", found.error().message, seconds(options_.timeout)));
      std::this_thread::sleep_for(kSlice);  // tidy: allow(sleep) there is no event for a name that becomes known
    }
  }

  static Result<Address> address_of(const std::string& url) { return Address::parse(url.substr(strlen("tcp://"))); }
  Key claim_name() const { return JobKeys(options_.run_id).root(); }

  // Where nodes find the root.
  Store& meeting_place() { return *(node_.last_root ? node_.last_root : node_.external_store); }

  Result<std::string> claimed_root() {
    const Deadline deadline = Deadline::after(kServerStartTime);
    MUSTER_ASSIGN(const auto claims, meeting_place().claims(claim_name(), deadline));
    if (const auto found = claims.find(claim_name()); found != claims.end()) return to_string(found->second);
    if (node_.root_moves) return std::string();
    MUSTER_ASSIGN(const bool there, meeting_place().check({claim_name()}, deadline));
    if (!there) return std::string();
    MUSTER_ASSIGN(const Bytes value, meeting_place().get(claim_name(), deadline));
    return to_string(value);
  }

  Result<> become_root(const Address& towards) {
    const std::string& own = options_.local_addr;
    MUSTER_ASSIGN(const Address listen, own.empty() ? local_address_towards(towards) : interface_address(own));
    // The server starts before the claim, because the claim contains its address.
    StoreServerOptions server = server_options();
    server.muster_listen.push_back(listen.with_port(last_.leaves ? options_.master_port : 0));
    auto started = start_server(server, Deadline::after(kServerStartTime));
    if (!started && last_.leaves) {  // a firewall may know that port only, but the last root may be on this host
      server.muster_listen.back() = listen.with_port(0);
      started = start_server(std::move(server), Deadline::after(kServerStartTime));
    }
    MUSTER_TRY(std::move(started));
    node_.root_url = tcp_url(node_.server->muster_addresses().back());
    const Deadline deadline = Deadline::after(kServerStartTime);
    if (node_.root_moves) {
      MUSTER_ASSIGN(node_.claim, node_.external_store->claim(claim_name(), as_bytes(node_.root_url),
                                                             options_.heartbeat_timeout, deadline));
      node_.root = true;
      return {};
    }
    // The node that stores its address first becomes the root.
    MUSTER_ASSIGN(const Bytes holds, meeting_place().compare_set(claim_name(), {}, as_bytes(node_.root_url), deadline));
    node_.root = to_string(holds) == node_.root_url;
    if (!node_.root) return fail(ErrorCode::kAlreadyExists, "another node became the root");
    return {};
  }

  Result<> find_interface(const Address& root) {
    node_.interface = options_.local_addr;
    if (!node_.interface.empty() || std::getenv("MUSTER_INTERFACE") != nullptr) return {};
    MUSTER_ASSIGN(const Address local, local_address_towards(root));
    node_.interface = local.host();
    return {};
  }

  StoreServerOptions server_options() {
    const Bytes name = generate_secret();
    const Address workers = Address::unix_abstract("muster-" + to_hex(ByteView(name).first(12)));
    node_.url = workers.to_string();
    StoreServerOptions server;
    server.credentials = {node_.secret, node_.tls};
    server.muster_listen = {workers};
    return server;
  }

  Result<> start_server(StoreServerOptions server, const Deadline& deadline) {
    node_.upstream = server.upstream;
    server.session = node_.session = fresh_session_id();
    MUSTER_ASSIGN(node_.server, StoreServer::start(std::move(server), deadline));
    return {};
  }

  Result<> start_fixed_root(const Address& master) {
    const std::string& own = options_.local_addr;
    MUSTER_ASSIGN(const Address local, own.empty() ? master : interface_address(own));
    const Address listen = local.with_port(master.port());
    StoreServerOptions server = server_options();
    server.muster_listen.push_back(listen);
    const auto started = start_server(std::move(server), Deadline::after(kServerStartTime));
    if (!started) {
      return fail(started.error().code, started.error().message +
                                            "; node 0 listens at --master-addr: does another node 0 run there, or is "
                                            "this not an address of this host (then give one with --local-addr)?");
    }
    node_.root = true;
    node_.root_url = tcp_url(master);
    if (listen.is_loopback() && options_.master_addr != "localhost" && options_.master_addr != listen.host())
      events_.notice(
          fmt::format("--master-addr {} is {} here, which other hosts cannot reach; give an address of this host with "
                      "--local-addr",
                      options_.master_addr, listen.host()));
    return {};
  }

  Result<> start_proxy(const std::string& root_url, const Deadline& deadline) {
    node_.root_url = root_url;
    StoreServerOptions server = server_options();
    server.tiered = options_.tiered;
    server.upstream = root_url;
    if (options_.store_fanout == 0 || !last_.url.empty()) return start_server(std::move(server), deadline);
    return start_tier(std::move(server), deadline);
  }

  // A node's place in the tree of proxies is its order of arrival. Each node listens for the proxies below it.
  Result<> start_tier(StoreServerOptions server, const Deadline& deadline) {
    MUSTER_ASSIGN(const auto root, open_store(node_.root_url, options_.secret, deadline));
    const JobKeys keys(options_.run_id);
    MUSTER_ASSIGN(const int64_t index, root->add(keys.tier_count(), 1, deadline));
    const int parent = parent_of(static_cast<int>(std::min<int64_t>(index, options_.nnodes_max - 1)),
                                 options_.nnodes_max, options_.store_fanout);
    const char* given = std::getenv("MUSTER_INTERFACE");
    MUSTER_ASSIGN(const Address listen, interface_address(node_.interface.empty() ? given : node_.interface));
    server.muster_listen.push_back(listen.with_port(0));
    MUSTER_TRY(parent > 0 ? start_below(*root, keys.tier(parent), std::move(server))
                          : start_server(std::move(server), Deadline::after(kServerStartTime)));
    const std::string url = tcp_url(node_.server->muster_addresses().back());
    return root->set(keys.tier(index), as_bytes(url), Deadline::after(kServerStartTime));
  }

  // If the parent has died, perhaps before it published its address, this node connects to the root.
  Result<> start_below(Store& root, const Key& parent, StoreServerOptions server) {
    const auto url = root.get(parent, Deadline::after(kParentStartTime));
    if (url) {
      StoreServerOptions below = server;
      below.upstream = to_string(*url);
      const auto started = start_server(std::move(below), Deadline::after(kParentAnswerTime));
      node_.direct = !started;
      if (started || !is_unreachable(started.error())) return started;
    } else if (url.error().code != ErrorCode::kTimeout) {
      return tl::unexpected(url.error());
    }
    return start_server(std::move(server), Deadline::after(kServerStartTime));
  }

  // The process that listens at the root's address may be the root of a job that is about to end. With `may_serve` this
  // node then replaces it.
  Result<> await_root(const Address& root, bool may_serve) {
    const std::string root_url = tcp_url(root);
    const Deadline quiet = Deadline::after(kNoticeDelay);
    bool notified = false;
    while (true) {
      const auto started = start_proxy(root_url, slice());
      if (started || !is_unreachable(started.error())) return started;
      if (cancelled()) return stopped();
      if (may_serve && start_fixed_root(root)) return {};
      if (deadline_.passed())
        return fail(ErrorCode::kTimeout,
                    fmt::format("node 0 did not answer at {} within {:g} s ({}); start `muster run` there, or give a "
                                "longer --timeout",
                                root_url, seconds(options_.timeout), started.error().message));
      if (quiet.passed() && !std::exchange(notified, true))
        events_.notice(fmt::format("waiting for node 0 at {}", root_url));
    }
  }

  static double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }
  Deadline slice(Duration patience = kSlice) const { return deadline_.or_sooner(deadline_.clock().now() + patience); }
  bool cancelled() const { return events_.cancelled != nullptr && *events_.cancelled; }
  static tl::unexpected<Error> stopped() { return fail(ErrorCode::kAborted, "stopped while waiting for the root"); }

  const RunOptions& options_;
  const NodeStoreEvents& events_;
  const LastRoot last_;
  const bool root_is_fixed_;  // true: reconnects to a root that no other node replaces
  const Deadline deadline_;
  NodeStore node_;
};

}  // namespace

std::string tcp_url(const Address& address) { return "tcp://" + address.to_string(); }

// The kernel chooses the target as the source address only if the target is an address of this host.
bool is_local(const Address& address) {
  const auto source = local_address_towards(address);
  return source && source->host() == address.host();
}

void NodeStore::give_up_root(const std::string& run_id, const Deadline& deadline) {
  if (root && external_store && !claim) (void)external_store->delete_key(JobKeys(run_id).root(), deadline);
}

Result<> NodeStore::open_generation(int generation, uint16_t port) {
  const auto loopback = [](uint16_t number) { return Address::parse("127.0.0.1:0")->with_port(number); };
  if (torch_port != 0) server->remove_torch_listener(loopback(torch_port));
  auto bound = server->add_torch_listener(loopback(port), generation_prefix(generation));
  if (!bound && port != 0) bound.error().message += "; without --master-port any free port is taken";
  if (!bound) return tl::unexpected(bound.error());
  torch_port = bound->port();
  return {};
}

Result<NodeStore> open_node_store(const RunOptions& options, const NodeStoreEvents& events, LastRoot last) {
  return Bootstrap(options, events, std::move(last)).open();
}

}  // namespace muster
