#include <sys/socket.h>

#include <array>
#include <functional>
#include <latch>

#include "contract/external_store_contract.h"
#include "io/certificates.h"
#include "muster/store/etcd/etcd_space.h"

namespace muster {
namespace {

Deadline soon() { return Deadline::after(60s); }

// An etcd cluster of one server. Each world uses its own prefix in it.
class EtcdServer {
 public:
  explicit EtcdServer(const std::vector<std::string>& options = {}, const std::string& scheme = "http") {
    const std::string client = scheme + "://127.0.0.1:" + std::to_string(port);
    const std::string peer = "http://127.0.0.1:" + std::to_string(free_port());
    std::vector<std::string> words = {"etcd",
                                      "--heartbeat-interval=20",  // makes the single server elect itself sooner
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

ExternalServer start_etcd() {
  EtcdServer server;
  return {std::move(server.process), server.url(), server.host(), /*persists=*/true};
}

INSTANTIATE_TEST_SUITE_P(Etcd, StoreContract, testing::Values(make_etcd_world));
INSTANTIATE_TEST_SUITE_P(Etcd, TtlLockContract, testing::Values(make_etcd_world));
INSTANTIATE_TEST_SUITE_P(Etcd, ExternalStoreContract, testing::Values(start_etcd));

TEST(EtcdStore, SeparatesPrefixes) {
  const auto& server = EtcdServer::shared();
  NEEDS(server);
  const auto a = open_when_up(server.url("/apart")), b = open_when_up(server.url("?prefix=apart2"));
  EXPECT_OK(a->set("k", as_bytes("a"), soon()));
  EXPECT_EQ(b->check({"k"}, soon()), false);
  EXPECT_EQ(b->list_keys("", soon()), std::vector<Key>{});
  EXPECT_EQ(open_when_up(server.url("/apart/"))->get("k", soon()), to_bytes("a"));
}

TEST(EtcdStore, NamesMissingServers) {
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

// An etcd server that requires client certificates, and the certificates of the server and of the client.
struct TlsEtcd {
  std::string url(const std::string& ca, const TlsFiles& mine) const {
    return "etcds://" + server.host() + "/tls?ca=" + ca + "&cert=" + mine.certificate_file + "&key=" + mine.key_file;
  }
  TestAuthority authority;
  const TlsFiles theirs = authority.issue("127.0.0.1"), ours = authority.issue("client");
  EtcdServer server{{"--cert-file=" + theirs.certificate_file, "--key-file=" + theirs.key_file,
                     "--trusted-ca-file=" + authority.ca_file(), "--client-cert-auth"},
                    "https"};
};

TEST(EtcdStore, UsesTls) {
  const TlsEtcd etcd;
  NEEDS(etcd.server);
  const auto store = open_when_up(etcd.url(etcd.authority.ca_file(), etcd.ours));
  ASSERT_NE(store, nullptr);
  std::thread waiter([&] {
    const auto other = open_when_up(etcd.url(etcd.authority.ca_file(), etcd.ours));
    EXPECT_OK(other->set("here", {}, soon()));
    EXPECT_EQ(other->get("k", soon()), to_bytes("v"));
  });
  EXPECT_OK(store->wait({"here"}, soon()));
  EXPECT_OK(store->set("k", as_bytes("v"), soon()));
  waiter.join();
}

TEST(EtcdStore, ReportsUntrustedCertificates) {
  const TlsEtcd etcd;
  NEEDS(etcd.server);
  open_when_up(etcd.url(etcd.authority.ca_file(), etcd.ours));
  TestAuthority other_authority("another authority");
  const auto distrusted = open_store(etcd.url(other_authority.ca_file(), etcd.ours), {}, soon());
  expect_error(distrusted, ErrorCode::kAuthentication, etcd.server.host());
  expect_error(distrusted, ErrorCode::kAuthentication, "certificate");
  const auto refused = open_store(etcd.url(etcd.authority.ca_file(), other_authority.issue("client")), {}, soon());
  expect_error(refused, ErrorCode::kUnavailable, etcd.server.host());
  expect_error(refused, ErrorCode::kUnavailable, "may not accept the client's certificate");
  expect_error(open_store("etcds://" + etcd.server.host() + "?ca=/no/such/file", {}, soon()),
               ErrorCode::kInvalidArgument, "/no/such/file");
  expect_error(open_store(etcd.server.url(), {}, soon()), ErrorCode::kUnavailable, etcd.server.host());
}

// Reads one HTTP request, whose body is a JSON object, and answers it.
void answer_post(int client, const std::string& body, const std::function<void()>& before_the_answer) {
  std::string request;
  while (!request.ends_with('}')) {
    std::array<char, 4096> bytes;
    const ssize_t count = ::recv(client, bytes.data(), bytes.size(), 0);
    if (count <= 0) return;
    request.append(bytes.data(), static_cast<size_t>(count));
  }
  before_the_answer();
  const std::string answer = "HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  (void)::send(client, answer.data(), answer.size(), MSG_NOSIGNAL);
}

// One caller asks for the lease of all callers, and etcd does not answer. The deadline of another caller still holds.
TEST(EtcdSpace, KeepsTheDeadlineOfACallerThatWaitsForAnother) {
  if (!Http::create()) GTEST_SKIP() << "libcurl is not installed";
  std::latch asked(1), answer(1);
  const FakeServer server([&](int client) {
    answer_post(client, "{}", [] {});  // to EtcdClient::connect()
    answer_post(client, R"({"ID": "7"})", [&] {
      asked.count_down();
      answer.wait();
    });
  });
  EtcdTarget target;
  target.hosts.push_back({"127.0.0.1", server.port()});
  EtcdSpace space(EtcdClient::connect(target, soon()).value(), "/test");
  std::thread first([&] { EXPECT_EQ(space.lease(Deadline::after(20s)), 7); });
  asked.wait();
  expect_error(space.lease(Deadline::after(100ms)), ErrorCode::kTimeout, "lease");
  answer.count_down();
  first.join();
}

TEST(EtcdStore, ReportsRequestsThatAreTooLarge) {
  const auto& server = EtcdServer::shared();
  NEEDS(server);
  const auto store = open_when_up(server.url("/large"));
  expect_error(store->set("big", Bytes(2 << 20), soon()), ErrorCode::kResourceExhausted, "larger than max");
  EXPECT_EQ(store->check({"big"}, soon()), false);
}

}  // namespace
}  // namespace muster
