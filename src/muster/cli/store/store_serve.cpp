#include "muster/cli/store/store_serve.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>

#include "muster/io/connect/tls.h"

namespace muster {
namespace {

constexpr Duration kUpstreamNoticeDelay =
    std::chrono::seconds(3);  // of waiting for the upstream, until the user is notified

Result<Address> address_of(const std::string& text) {
  if (text.starts_with("unix:")) return Address::parse(text);
  const std::string rest = text.starts_with("tcp://") ? text.substr(6) : text;
  MUSTER_ASSIGN(const HostPort where, parse_host_port(rest, 0));
  if (auto own = interface_address(where.host)) return own->with_port(where.port);
  MUSTER_ASSIGN(const auto found, resolve(where.host, where.port));
  return found.front();
}

Result<std::vector<Address>> addresses_of(const std::vector<std::string>& texts) {
  std::vector<Address> addresses;
  for (const std::string& text : texts) {
    MUSTER_ASSIGN(addresses.emplace_back(), address_of(text));
  }
  return addresses;
}

bool reachable_from_outside(const Address& address) { return !address.is_unix() && !address.is_loopback(); }

void print(const StoreServer& server) {
  for (const Address& address : server.muster_addresses()) {
    std::printf("%s%s\n", address.is_unix() ? "" : "tcp://", address.to_string().c_str());
  }
  for (const Address& address : server.torch_addresses()) {
    std::printf("TCPStore clients of PyTorch: %s\n", address.to_string().c_str());
  }
  std::fflush(stdout);
}

// Notifies the user if the upstream does not run yet.
Result<std::unique_ptr<StoreServer>> start(const StoreServerOptions& options) {
  const Deadline deadline = Deadline::after(kServerStartTime);
  auto started = StoreServer::start(options, deadline.or_sooner(deadline.clock().now() + kUpstreamNoticeDelay));
  if (started || started.error().code != ErrorCode::kTimeout) return started;
  std::fprintf(stderr, "muster: store serve: --upstream: %s; waiting for it\n", started.error().message.c_str());
  return StoreServer::start(options, deadline);
}

}  // namespace

Result<> serve_store(const ServeOptions& options) {
  StoreServerOptions server = options.server;
  MUSTER_ASSIGN(server.muster_listen, addresses_of(options.listen));
  MUSTER_ASSIGN(server.torch_listen, addresses_of(options.torch_listen));
  MUSTER_ASSIGN(server.credentials.tls, TlsContext::from_environment());
  const auto open = [](const std::vector<Address>& all) {
    return std::any_of(all.begin(), all.end(), reachable_from_outside);
  };
  if (open(server.muster_listen) && server.credentials.secret.empty() && server.credentials.tls == nullptr) {
    return fail(
        ErrorCode::kInvalidArgument,
        "anyone on the network could use this store: give --secret-file or MUSTER_SECRET here and to its clients");
  }
  if (open(server.torch_listen)) {
    std::fputs("muster: store serve: PyTorch's protocol has no secret: anyone on the network can use this store\n",
               stderr);
  }
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &ends, nullptr);  // before threads start, because they inherit the mask
  MUSTER_ASSIGN(const auto running, start(server));
  print(*running);
  int ended_by = 0;
  ::sigwait(&ends, &ended_by);
  return {};
}

}  // namespace muster
