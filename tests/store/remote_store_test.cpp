#include <unistd.h>

#include "contract/store_contract.h"
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

}  // namespace
}  // namespace muster
