#include "muster/launch/node_store.h"

#include <fmt/format.h>

#include <cstdlib>

#include "muster/io/address.h"
#include "muster/io/handshake.h"
#include "muster/io/tls.h"

namespace muster {
namespace {

constexpr Duration kQuietTime = std::chrono::seconds(3);  // of waiting for the root, before the user is told
constexpr Duration kStartTime = std::chrono::seconds(30);

using Notice = std::function<void(std::string)>;

// The kernel's choice of a source address is the target itself only if that belongs to this host.
bool is_local(const Address& address) {
  const auto source = local_address_towards(address);
  return source && source->host() == address.host();
}

Result<Address> resolve_one(const std::string& host, uint16_t port) {
  const auto found = resolve(host, port);
  if (!found) return fail(found.error().code, "--master-addr: " + found.error().message);
  return found->front();
}

StoreServerOptions local_options(const RunOptions& options, NodeStore& node) {
  const Bytes name = generate_secret();
  const Address workers = Address::unix_abstract("muster-" + to_hex(ByteView(name).first(12)));
  node.url = workers.to_string();
  StoreServerOptions server;
  server.credentials = {node.secret, node.tls};
  server.muster_listen = {workers};
  // Workers learn the port from their environment. Several nodes may be on one host, so there any free one will do.
  const uint16_t port = options.nnodes_max > 1 ? 0 : options.master_port;
  server.torch_listen = {Address::parse("127.0.0.1:0")->with_port(port)};
  return server;
}

Result<> start(NodeStore& node, StoreServerOptions options, const Deadline& deadline) {
  MUSTER_ASSIGN(node.server, StoreServer::start(std::move(options), deadline));
  node.torch_port = node.server->torch_addresses().front().port();
  return {};
}

Result<> start_root(NodeStore& node, const RunOptions& options, const Address& master, const Notice& notice) {
  Address listen = master;
  if (!options.local_addr.empty()) {
    MUSTER_ASSIGN(const Address local, interface_address(options.local_addr));
    listen = local.with_port(master.port());
  }
  StoreServerOptions server = local_options(options, node);
  server.muster_listen.push_back(listen);
  const auto started = start(node, std::move(server), Deadline::after(kStartTime));
  if (!started) {
    return fail(started.error().code, started.error().message +
                                          "; node 0 listens at --master-addr: is another node 0 there, or is the "
                                          "address not this host's (then name one with --local-addr)?");
  }
  node.root = true;
  node.root_url = "tcp://" + master.to_string();
  if (listen.is_loopback() && options.master_addr != "localhost" && options.master_addr != listen.host())
    notice(
        fmt::format("--master-addr {} is {} here, which other hosts cannot reach; name an address of this host with "
                    "--local-addr",
                    options.master_addr, listen.host()));
  return {};
}

Result<> start_proxy(NodeStore& node, const RunOptions& options, const Address& master, const Notice& notice) {
  node.root_url = "tcp://" + master.to_string();
  StoreServerOptions server = local_options(options, node);
  server.upstream = node.root_url;
  const Deadline deadline = Deadline::after(options.timeout);
  const Deadline quiet = deadline.or_sooner(Deadline::after(kQuietTime).when());
  auto started = start(node, server, quiet);
  const auto not_there = [&] {
    return !started && (started.error().code == ErrorCode::kTimeout || started.error().code == ErrorCode::kUnavailable);
  };
  if (not_there() && !deadline.passed()) {
    notice(fmt::format("waiting for node 0 at {}", node.root_url));
    started = start(node, std::move(server), deadline);
  }
  if (not_there())
    return fail(
        ErrorCode::kTimeout,
        fmt::format("node 0 did not answer at {} within {:g} s ({}); start `muster run` there, or give a longer "
                    "--timeout",
                    node.root_url, std::chrono::duration<double>(options.timeout).count(), started.error().message));
  return started;
}

}  // namespace

Result<NodeStore> open_node_store(const RunOptions& options, const Notice& notice) {
  NodeStore node;
  node.secret = options.secret;
  if (options.nnodes_max == 1) {
    if (!options.master_addr.empty()) MUSTER_TRY(resolve_one(options.master_addr, options.master_port));
    if (node.secret.empty()) node.secret = generate_secret();
    node.root = true;
    MUSTER_TRY(start(node, local_options(options, node), Deadline::after(kStartTime)));
    return node;
  }
  MUSTER_ASSIGN(node.tls, TlsContext::from_environment());
  MUSTER_ASSIGN(const Address master, resolve_one(options.master_addr, options.master_port));
  node.interface = options.local_addr;
  if (node.interface.empty() && std::getenv("MUSTER_INTERFACE") == nullptr) {
    MUSTER_ASSIGN(const Address local, local_address_towards(master));
    node.interface = local.host();
  }
  const bool may_be_root = options.node_rank ? *options.node_rank == 0 : is_local(master);
  if (may_be_root) {
    const auto started = start_root(node, options, master, notice);
    const bool somebody_is = !started && started.error().code == ErrorCode::kUnavailable && !options.node_rank;
    if (!started && !somebody_is) return tl::unexpected(started.error());
  }
  if (!node.root) MUSTER_TRY(start_proxy(node, options, master, notice));
  if (node.root && node.secret.empty())
    notice(
        fmt::format("no secret was given, so whoever reaches {} can join this job; set MUSTER_SECRET to the same hex "
                    "digits on all nodes, or use --secret-file",
                    node.root_url));
  return node;
}

}  // namespace muster
