#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <atomic>
#include <thread>

#include "contract/external_store_contract.h"
#include "io/certificates.h"

namespace muster {
namespace {

Deadline soon() { return Deadline::after(60s); }

// One server is shared by most tests of this program. Each world uses its own prefix in it.
class RedisServer {
 public:
  explicit RedisServer(const std::vector<std::string>& options = {}) : RedisServer(false, options) {}
  RedisServer(bool tls, const std::vector<std::string>& options) {
    std::vector<std::string> words = {"redis-server",
                                      "--port",
                                      tls ? "0" : std::to_string(port),
                                      "--bind",
                                      "127.0.0.1",
                                      "--dir",
                                      "{folder}",
                                      "--unixsocket",
                                      "{folder}/socket",
                                      "--save",
                                      "",
                                      "--appendonly",
                                      "no"};
    if (tls) words.insert(words.end(), {"--tls-port", std::to_string(port)});
    words.insert(words.end(), options.begin(), options.end());
    process = ServerProcess::start(words);
  }
  static RedisServer& shared() {
    static RedisServer server;
    return server;
  }
  std::string url(const std::string& rest) const { return "redis://127.0.0.1:" + std::to_string(port) + rest; }

  const uint16_t port = free_port();
  std::unique_ptr<ServerProcess> process;
};

#define NEEDS(server) \
  if (!(server).process) GTEST_SKIP() << "redis-server is not installed"

std::string fresh_prefix() {
  static std::atomic<int> serial = 0;
  return "test " + std::to_string(serial++);
}

struct RedisWorld : StoreWorld {
  std::unique_ptr<Store> open() override { return open_when_up(RedisServer::shared().url("?prefix=" + prefix)); }
  const std::string prefix = fresh_prefix();
};
struct RedisUnixWorld : StoreWorld {
  std::unique_ptr<Store> open() override {
    return open_when_up("redis+unix://" + RedisServer::shared().process->folder() + "/socket?prefix=" + prefix);
  }
  const std::string prefix = fresh_prefix();
};

// A Redis server that speaks TLS only, and requires client certificates.
struct TlsRedis {
  explicit TlsRedis(const std::string& name = "localhost") : theirs(authority.issue(name)) {}
  std::string url(const std::string& ca, const TlsFiles& mine = {}, const std::string& host = "localhost") const {
    std::string text = "rediss://" + host + ":" + std::to_string(server.port) + "/tls?ca=" + ca;
    if (!mine.key_file.empty()) text += "&cert=" + mine.certificate_file + "&key=" + mine.key_file;
    return text;
  }
  std::string url() const { return url(authority.ca_file(), ours); }
  static TlsRedis& shared() {
    static TlsRedis redis;
    return redis;
  }
  TestAuthority authority;
  const TlsFiles theirs, ours = authority.issue("client");
  RedisServer server{true,
                     {"--tls-cert-file", theirs.certificate_file, "--tls-key-file", theirs.key_file,
                      "--tls-ca-cert-file", authority.ca_file()}};
};
struct RedisTlsWorld : StoreWorld {
  std::unique_ptr<Store> open() override { return open_when_up(TlsRedis::shared().url() + "&prefix=" + prefix); }
  const std::string prefix = fresh_prefix();
};
std::unique_ptr<StoreWorld> make_tls_world() {
  return TlsRedis::shared().server.process ? std::make_unique<RedisTlsWorld>() : nullptr;
}

template <class World>
std::unique_ptr<StoreWorld> make() {
  return RedisServer::shared().process ? std::make_unique<World>() : nullptr;
}

ExternalServer start_redis() {
  RedisServer server;
  return {std::move(server.process), server.url(""), "127.0.0.1:" + std::to_string(server.port)};
}

INSTANTIATE_TEST_SUITE_P(Redis, StoreContract, testing::Values(make<RedisWorld>, make<RedisUnixWorld>, make_tls_world));
INSTANTIATE_TEST_SUITE_P(Redis, TtlLockContract, testing::Values(make<RedisWorld>, make<RedisUnixWorld>));
INSTANTIATE_TEST_SUITE_P(Redis, ExternalStoreContract, testing::Values(start_redis));

TEST(RedisStore, SeparatesDatabasesAndPrefixes) {
  const auto& server = RedisServer::shared();
  NEEDS(server);
  const auto a = open_when_up(server.url("/0/apart")), b = open_when_up(server.url("/1?prefix=apart"));
  const auto same = open_when_up(server.url("/apart"));
  EXPECT_OK(a->set("k", as_bytes("a"), soon()));
  EXPECT_EQ(b->check({"k"}, soon()), false);
  EXPECT_EQ(same->get("k", soon()), to_bytes("a"));
}

TEST(RedisStore, NamesAMissingServer) {
  const std::string unused = "127.0.0.1:" + std::to_string(free_port());
  expect_error(open_store("redis://" + unused, {}, soon()), ErrorCode::kUnavailable, unused);
}

TEST(RedisStore, NeedsThePasswordThatTheServerDemands) {
  RedisServer server({"--requirepass", "open sesame"});
  NEEDS(server);
  const std::string host = "@127.0.0.1:" + std::to_string(server.port);
  EXPECT_OK(open_when_up("redis://:open%20sesame" + host)->set("k", {}, soon()));
  EXPECT_OK(open_store("redis://default:open%20sesame" + host, {}, soon()));
  expect_error(open_store(server.url(""), {}, soon()), ErrorCode::kAuthentication, "Redis at 127.0.0.1");
  expect_error(open_store("redis://:wrong" + host, {}, soon()), ErrorCode::kAuthentication, "WRONGPASS");
}

TEST(RedisStore, UsesTls) {
  const auto& redis = TlsRedis::shared();
  NEEDS(redis.server);
  const auto store = open_when_up(redis.url());
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(store->address()->host, "localhost");
  const Bytes large(3 << 20, 'x');  // of many TLS records
  std::thread waiter([&] {
    const auto other = open_when_up(redis.url());
    EXPECT_OK(other->set("here", {}, soon()));
    EXPECT_EQ(other->get("large", soon()), large);
  });
  EXPECT_OK(store->wait({"here"}, soon()));
  EXPECT_OK(store->set("large", large, soon()));
  waiter.join();
}

TEST(RedisStore, ReportsUntrustedCertificates) {
  const auto& redis = TlsRedis::shared();
  NEEDS(redis.server);
  open_when_up(redis.url());
  const std::string& ca = redis.authority.ca_file();
  TestAuthority other("another authority");
  const auto distrusted = open_store(redis.url(other.ca_file(), redis.ours), {}, soon());
  expect_error(distrusted, ErrorCode::kAuthentication, "Redis at localhost");
  expect_error(distrusted, ErrorCode::kAuthentication, "certificate was refused");
  expect_error(open_store(redis.url(ca, redis.ours, "127.0.0.1"), {}, soon()), ErrorCode::kAuthentication, "mismatch");
  EXPECT_FALSE(open_store(redis.url(ca), {}, soon())) << "the server requires a certificate";
  EXPECT_FALSE(open_store(redis.url(ca, other.issue("client")), {}, soon()));
}

TEST(RedisStore, ReportsAServerWithoutTls) {
  const auto& redis = TlsRedis::shared();
  const auto& plain = RedisServer::shared();
  NEEDS(plain);
  open_when_up(plain.url(""));
  const std::string port = std::to_string(plain.port), ca = "?ca=" + redis.authority.ca_file();
  EXPECT_FALSE(open_store("rediss://localhost:" + port + ca, {}, Deadline::after(500ms)));
  expect_error(open_store("rediss://localhost:" + port + "?ca=/nowhere", {}, soon()), ErrorCode::kInvalidArgument,
               "cannot read the TLS CA '/nowhere'");
  expect_error(open_store("rediss://localhost" + ca + "&cert=" + redis.ours.certificate_file, {}, soon()),
               ErrorCode::kInvalidArgument, "go together");
  expect_error(open_store("redis://localhost" + ca, {}, soon()), ErrorCode::kInvalidArgument, "rediss://");
}

TEST(RedisStore, ReportsAFullServer) {
  RedisServer server({"--maxmemory", "1mb", "--maxmemory-policy", "noeviction"});
  NEEDS(server);
  const auto store = open_when_up(server.url(""));
  const auto full = [&]() -> Result<> {
    for (int i = 0; i < 100; ++i) MUSTER_TRY(store->set(std::to_string(i), Bytes(100000), soon()));
    return {};
  };
  expect_error(full(), ErrorCode::kResourceExhausted, "maxmemory");
}

// While it exists, a signal every 5 ms interrupts the system calls of this thread.
class Interruptions {
 public:
  Interruptions() {
    struct sigaction action {};  // without SA_RESTART
    action.sa_handler = [](int) { ++count; };
    ::sigaction(SIGALRM, &action, &before_);
    const itimerval often{{0, 5000}, {0, 5000}};
    ::setitimer(ITIMER_REAL, &often, nullptr);
  }
  ~Interruptions() {
    const itimerval never{};
    ::setitimer(ITIMER_REAL, &never, nullptr);
    ::sigaction(SIGALRM, &before_, nullptr);
  }
  Interruptions(const Interruptions&) = delete;
  Interruptions& operator=(const Interruptions&) = delete;
  static inline std::atomic<int> count = 0;

 private:
  struct sigaction before_ {};
};

TEST(RedisStore, WaitsForAReplyDespiteSignals) {
  const Interruptions interruptions;
  const FakeServer server([](int client) {
    std::array<char, 4096> command;
    while (::recv(client, command.data(), command.size(), 0) > 0) {
      const int enough = Interruptions::count + 20;
      while (Interruptions::count < enough) std::this_thread::yield();
      (void)::send(client, "+OK\r\n", 5, MSG_NOSIGNAL);
    }
  });
  EXPECT_OK(open_store("redis://127.0.0.1:" + std::to_string(server.port()), {}, soon()));
}

}  // namespace
}  // namespace muster
