#include <sys/wait.h>
#include <unistd.h>

#include "contract/store_contract.h"
#include "io/certificates.h"
#include "muster/store/remote_store.h"
#include "store/expect.h"
#include "store/test_server.h"

namespace muster {
namespace {

struct TcpWorld : StoreWorld {
  std::unique_ptr<Store> open() override { return open_or_fail(root.tcp_url()); }
  TestServer root;
};
struct UnixWorld : TcpWorld {
  std::unique_ptr<Store> open() override { return open_or_fail(root.unix_url()); }
};
// Handles connect to the two proxies and to the root in turn.
struct ProxyWorld : TcpWorld {
  std::unique_ptr<Store> open() override {
    const std::vector<std::string> urls = {over_tcp.unix_url(), over_unix.tcp_url(), root.tcp_url()};
    return open_or_fail(urls[opened++ % urls.size()]);
  }
  TestServer over_tcp{root.tcp_url()}, over_unix{root.unix_url()};
  size_t opened = 0;
};
// Proxies that answer reads from leases and merge requests. Handles connect to the root and to every proxy.
struct TieredWorld : TcpWorld {
  static StoreServerOptions options() {
    StoreServerOptions tiered;
    tiered.tiered = true;
    return tiered;
  }
  std::unique_ptr<Store> open() override {
    const std::vector<std::string> urls = {leaf.unix_url(), leaf.unix_url(), other.tcp_url(), middle.unix_url(),
                                           root.tcp_url()};
    return open_or_fail(urls[opened++ % urls.size()]);
  }
  TestServer middle{root.tcp_url(), options()}, leaf{middle.tcp_url(), options()}, other{root.unix_url(), options()};
  size_t opened = 0;
};
struct PrefixWorld : TcpWorld {
  std::unique_ptr<Store> open() override { return prefix_store("job", TcpWorld::open()); }
};

template <class World>
std::unique_ptr<StoreWorld> make() {
  return std::make_unique<World>();
}

INSTANTIATE_TEST_SUITE_P(Tcp, StoreContract, testing::Values(make<TcpWorld>));
INSTANTIATE_TEST_SUITE_P(Unix, StoreContract, testing::Values(make<UnixWorld>));
INSTANTIATE_TEST_SUITE_P(Proxy, StoreContract, testing::Values(make<ProxyWorld>));
INSTANTIATE_TEST_SUITE_P(Tiers, StoreContract, testing::Values(make<TieredWorld>));
INSTANTIATE_TEST_SUITE_P(PrefixOverTcp, StoreContract, testing::Values(make<PrefixWorld>));

/// A forked child drops the client that it inherited. The TLS session is still the parent's.
TEST(RemoteStoreOverTls, OutlivesAForkedChildThatDropsIt) {
  TestAuthority authority;
  StoreServerOptions options;
  options.credentials.tls = TlsContext::load(authority.issue("server")).value();
  const TestServer root("", std::move(options));
  const Credentials credentials{test_secret(), TlsContext::load(authority.issue("client")).value()};
  auto opened = remote_store(root.tcp_url(), credentials, test_deadline());
  ASSERT_TRUE(opened) << opened.error().to_string();
  std::unique_ptr<Store> store = std::move(*opened);
  EXPECT_OK(store->set("before", as_bytes("1"), test_deadline()));
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // ends a child that hangs
    store.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_OK(store->set("after", as_bytes("2"), test_deadline()));
  EXPECT_EQ(store->get("after", test_deadline()), to_bytes("2"));
}

}  // namespace
}  // namespace muster
