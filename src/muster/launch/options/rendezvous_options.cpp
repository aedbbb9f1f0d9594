// Reads the options of the rendezvous: the address of the root or of an external store, the secret, the timeouts.

#include <fmt/format.h>

#include <cmath>

#include "muster/io/address.h"
#include "muster/io/connect/handshake.h"
#include "muster/launch/options/option_values.h"
#include "muster/launch/options/parse_context.h"

namespace muster {
namespace {

constexpr uint16_t kDefaultPort = 29500;
constexpr int kManyNodes = 100;  // above this, the connections to one root cost more than a second tier

// Reads the URL of Redis, etcd or a file. With one of these, no node's address is needed.
Result<bool> read_rendezvous_url(ParseContext& r) {
  // Without --rdzv-backend, the first backend with the endpoint's scheme is used.
  constexpr std::pair<std::string_view, std::string_view> kOthers[] = {{"redis", "redis://"},  {"redis", "rediss://"},
                                                                       {"etcd", "etcd://"},    {"etcd", "etcds://"},
                                                                       {"etcd-v2", "etcd://"}, {"file", "file://"}};
  RunOptions& o = r.options;
  const std::string& endpoint = r.raw.rdzv_endpoint;
  const bool own = is_own_store(o.rdzv_backend);
  for (const auto& [name, scheme] : kOthers) {
    if (own ? !endpoint.starts_with(scheme) : o.rdzv_backend != name) continue;
    if (endpoint.starts_with("etcds://") && scheme == "etcd://") continue;
    if (endpoint.starts_with("rediss://") && scheme == "redis://") continue;
    if (own && o.rdzv_backend != RawOptions().rdzv_backend)
      return bad_option(
          fmt::format("--rdzv-backend {} and --rdzv-endpoint {} contradict each other", o.rdzv_backend, endpoint));
    const bool has_scheme = endpoint.find("://") != std::string::npos;
    if (endpoint.empty() || (has_scheme && !endpoint.starts_with(scheme)))
      return bad_option(fmt::format("--rdzv-backend {} needs --rdzv-endpoint {}...", name, scheme));
    o.rdzv_backend = name == "etcd-v2" ? "etcd" : name;
    o.rdzv_url = (has_scheme ? "" : std::string(scheme)) + endpoint;
    return true;
  }
  if (own) return false;
  return bad_value("--rdzv-backend", "static, c10d, parallel, redis, etcd or file", o.rdzv_backend);
}

// Returns a random port below the range from which the system takes ephemeral ports.
uint16_t free_port() {
  constexpr int kFirst = 20000, kCount = 10000;
  const Bytes random = generate_secret();
  return static_cast<uint16_t>(kFirst + (random[0] * 256 + random[1]) % kCount);
}

Result<> read_endpoint(ParseContext& r) {
  RunOptions& o = r.options;
  std::string endpoint = r.raw.rdzv_endpoint;
  if (endpoint.starts_with("tcp://")) endpoint.erase(0, 6);
  o.master_addr = r.raw.master_addr;
  std::string port = r.raw.master_port;
  if (!endpoint.empty()) {
    const auto parsed = parse_host_port(endpoint, 0);
    if (!parsed || endpoint.find("://") != std::string::npos)
      return bad_value("--rdzv-endpoint", "HOST[:PORT] or a URL (redis, etcd, file, tcp)", r.raw.rdzv_endpoint);
    o.master_addr = parsed->host;
    if (parsed->port != 0) port = std::to_string(parsed->port);
  }
  // torchrun requires brackets around IPv6 addresses here.
  if (o.master_addr.starts_with('[') && o.master_addr.ends_with(']'))
    o.master_addr = o.master_addr.substr(1, o.master_addr.size() - 2);
  const bool several = o.nnodes_max > 1;
  // With --hosts all agents are given a random port, because jobs may share their first host.
  o.master_port = !several ? 0 : o.hosts.empty() ? kDefaultPort : free_port();
  if (!port.empty()) {
    MUSTER_ASSIGN(const int number, parse_int("--master-port", port, 0, 65535, "a port from 0 to 65535"));
    o.master_port = static_cast<uint16_t>(number);
  }
  if (!several) return {};
  if (o.master_port == 0) return bad_option("--master-port 0 is for one node: several nodes need a fixed port");
  if (o.master_addr.empty() && !o.hosts.empty()) o.master_addr = o.hosts.front().host;
  if (!o.master_addr.empty()) return {};
  return bad_option(fmt::format("--nnodes {} needs --master-addr: the host of node 0", r.raw.nnodes));
}

}  // namespace

bool is_own_store(const std::string& backend) {
  return backend == "static" || backend == "c10d" || backend == "parallel";
}

Result<> read_rendezvous(ParseContext& r) {
  RunOptions& o = r.options;
  o.rdzv_backend = r.raw.rdzv_backend;
  MUSTER_TRY(choose_file_store(r));
  MUSTER_ASSIGN(const bool has_url, read_rendezvous_url(r));
  if (!has_url) MUSTER_TRY(read_endpoint(r));
  o.local_addr = r.raw.local_addr;
  o.timeout = std::chrono::seconds(300);
  MUSTER_TRY(read_rdzv_conf(r));
  if (!r.raw.timeout.empty()) {
    MUSTER_ASSIGN(o.timeout, parse_seconds("--timeout", r.raw.timeout));
  }
  MUSTER_ASSIGN(o.secret, read_secret(r.raw.secret_file, r.variable("MUSTER_SECRET")));
  o.tiered = r.raw.tiered;
  // With sqrt(nnodes) the root serves as many proxies as each middle proxy.
  o.store_fanout = o.tiered && o.nnodes_max > kManyNodes ? static_cast<int>(std::ceil(std::sqrt(o.nnodes_max))) : 0;
  if (r.raw.store_fanout != "auto") {
    MUSTER_ASSIGN(o.store_fanout,
                  parse_int("--store-fanout", r.raw.store_fanout, 0, kMaxNodes, "auto or a number >= 0"));
    if (o.store_fanout > 0 && !o.tiered)
      return bad_option(fmt::format("--store-fanout {} needs --enable-tiered-parallel-tcpstore", o.store_fanout));
  }
  o.run_id = r.raw.rdzv_id;
  // Several nodes must use the same run id; "none" is torchrun's default.
  if (o.run_id.empty()) {
    const Bytes random = generate_secret();
    o.run_id = o.nnodes_max > 1 && o.hosts.empty() ? "none" : to_hex(ByteView(random).first(8));
  }
  return {};
}

}  // namespace muster
