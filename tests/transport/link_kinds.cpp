#include "transport/link_kinds.h"

#include <unistd.h>

#include <atomic>

#include "io/certificates.h"
#include "muster/io/socket.h"

namespace muster {
namespace {

Address numeric(const char* text) { return Address::parse(text).value(); }

Address fresh_unix_address() {
  static std::atomic<int> count{0};
  return Address::unix_abstract("muster-link-test-" + std::to_string(getpid()) + "-" + std::to_string(count++));
}

Credentials with_secret() { return Credentials{to_bytes("a secret of the tests"), nullptr}; }

Credentials with_certificates() {
  static TestAuthority authority;
  static const auto context = TlsContext::load(authority.issue("tests")).value();
  return Credentials{to_bytes("a secret of the tests"), context};
}

}  // namespace

Result<std::unique_ptr<Listener>> ProcessLinkKind::listen(Loop& loop, LinkIdentity self, LinkHandler handler) const {
  const auto listen_here = shm ? listen_shm_links : listen_links;
  return listen_here(loop, address(), std::move(self), std::move(handler));
}

std::unique_ptr<Dial> ProcessLinkKind::connect(Loop& loop, const std::string& address, LinkIdentity self, Rank expected,
                                               const Deadline& deadline, ConnectHandler handler) const {
  const auto connect_there = shm ? connect_shm_link : connect_link;
  return connect_there(loop, numeric(address.c_str()), std::move(self), expected, deadline, std::move(handler));
}

LinkIdentity ProcessLinkKind::identity(Rank rank) const { return LinkIdentity{rank, 8, "test", 7, credentials()}; }

std::vector<ProcessLinkKind> process_link_kinds() {
  std::vector<ProcessLinkKind> kinds;
  kinds.push_back({"Tcp", [] { return numeric("127.0.0.1:0"); }, with_secret});
  if (listen_on(numeric("[::1]:0"))) kinds.push_back({"Tcp6", [] { return numeric("[::1]:0"); }, with_secret});
  kinds.push_back({"Unix", fresh_unix_address, with_secret});
  kinds.push_back({"TcpTls", [] { return numeric("127.0.0.1:0"); }, with_certificates});
  kinds.push_back({"UnixTls", fresh_unix_address, with_certificates});
  kinds.push_back({"Shm", fresh_unix_address, with_secret, /*shm=*/true});
  return kinds;
}

Deadline test_deadline() { return Deadline::after(std::chrono::seconds(120)); }

}  // namespace muster
