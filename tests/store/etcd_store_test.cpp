#include "contract/outside_contract.h"

namespace muster {
namespace {

Deadline soon() { return Deadline::after(60s); }

// A cluster of one; each world is a prefix of its own in it.
class EtcdServer {
 public:
  explicit EtcdServer(const std::vector<std::string>& options = {}) {
    const std::string client = "http://127.0.0.1:" + std::to_string(port);
    const std::string peer = "http://127.0.0.1:" + std::to_string(free_port());
    std::vector<std::string> words = {"etcd",
                                      "--heartbeat-interval=20",  // a cluster of one elects itself the sooner
                                      "--election-timeout=200",
                                      "--data-dir={folder}/data",
                                      "--listen-client-urls=" + client,
                                      "--advertise-client-urls=" + client,
                                      "--listen-peer-urls=" + peer,
                                      "--initial-advertise-peer-urls=" + peer,
                                      "--initial-cluster=default=" + peer};
    words.insert(words.end(), options.begin(), options.end());
    process = ServerProcess::start(words);
  }
  static EtcdServer& shared() {
    static EtcdServer server;
    return server;
  }
  std::string host() const { return "127.0.0.1:" + std::to_string(port); }
  std::string url(const std::string& rest = "") const { return "etcd://" + host() + rest; }

  const uint16_t port = free_port();
  std::unique_ptr<ServerProcess> process;
};

#define NEEDS(server) \
  if (!(server).process) GTEST_SKIP() << "etcd is not installed"

struct EtcdWorld : StoreWorld {
  std::unique_ptr<Store> open() override {
    return open_when_up(EtcdServer::shared().url("/test/" + std::to_string(number)));
  }
  size_t big() const override { return 1 << 20; }  // etcd's own limit is 1.5 MiB
  static inline std::atomic<int> worlds = 0;
  const int number = worlds++;
};
std::unique_ptr<StoreWorld> make_etcd_world() {
  return EtcdServer::shared().process ? std::make_unique<EtcdWorld>() : nullptr;
}

OutsideServer start_etcd() {
  EtcdServer server;
  return {std::move(server.process), server.url(), server.host(), /*persists=*/true};
}

INSTANTIATE_TEST_SUITE_P(Etcd, StoreContract, testing::Values(make_etcd_world));
INSTANTIATE_TEST_SUITE_P(Etcd, ClaimContract, testing::Values(make_etcd_world));
INSTANTIATE_TEST_SUITE_P(Etcd, OutsideContract, testing::Values(start_etcd));

TEST(EtcdStore, KeepsPrefixesApart) {
  const auto& server = EtcdServer::shared();
  NEEDS(server);
  const auto a = open_when_up(server.url("/apart")), b = open_when_up(server.url("?prefix=apart2"));
  EXPECT_OK(a->set("k", as_bytes("a"), soon()));
  EXPECT_EQ(b->check({"k"}, soon()), false);
  EXPECT_EQ(b->list_keys("", soon()), std::vector<Key>{});
  EXPECT_EQ(open_when_up(server.url("/apart/"))->get("k", soon()), to_bytes("a"));
}

TEST(EtcdStore, NamesServersThatAreNotThere) {
  const std::string a = "127.0.0.1:" + std::to_string(free_port()), b = "127.0.0.1:" + std::to_string(free_port());
  const auto store = open_store("etcd://" + a + "," + b, {}, soon());
  if (!store && store.error().code == ErrorCode::kUnsupported) GTEST_SKIP() << store.error().message;
  expect_error(store, ErrorCode::kUnavailable, a + ", " + b);
}

TEST(EtcdStore, AsksTheNextOfSeveralEndpoints) {
  const auto& server = EtcdServer::shared();
  NEEDS(server);
  open_when_up(server.url());
  const auto store = open_store("etcd://127.0.0.1:" + std::to_string(free_port()) + "," + server.host(), {}, soon());
  ASSERT_TRUE(store.has_value()) << store.error().to_string();
  EXPECT_EQ((*store)->add("endpoints", 1, soon()), 1);
}

TEST(EtcdStore, SaysWhatIsTooLargeForEtcd) {
  const auto& server = EtcdServer::shared();
  NEEDS(server);
  const auto store = open_when_up(server.url("/large"));
  expect_error(store->set("big", Bytes(2 << 20), soon()), ErrorCode::kResourceExhausted, "larger than max");
  EXPECT_EQ(store->check({"big"}, soon()), false);
}

}  // namespace
}  // namespace muster
