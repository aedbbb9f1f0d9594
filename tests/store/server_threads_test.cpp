// A server whose clients are spread over several threads.

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "contract/store_contract.h"
#include "muster/base/random.h"
#include "store/raw_client.h"

namespace muster {
namespace {

StoreServerOptions spread(unsigned threads) {
  StoreServerOptions options;
  options.threads = threads;
  options.few_clients = 1;
  return options;
}

template <unsigned threads>
struct SpreadWorld : StoreWorld {
  std::unique_ptr<Store> open() override { return open_or_fail(server.unix_url()); }
  TestServer server{"", spread(threads)};
};

template <unsigned threads>
std::unique_ptr<StoreWorld> make() {
  return std::make_unique<SpreadWorld<threads>>();
}
INSTANTIATE_TEST_SUITE_P(OneThread, StoreContract, testing::Values(make<1>));
INSTANTIATE_TEST_SUITE_P(FourThreads, StoreContract, testing::Values(make<4>));

class Threads : public testing::Test {
 protected:
  static Deadline soon() { return test_deadline(); }

  void in_threads(int count, const std::function<void(int, Store&)>& body) {
    std::vector<std::unique_ptr<Store>> stores;
    for (int i = 0; i < count; ++i) stores.push_back(open_or_fail(server_.unix_url()));
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back([&, i] { body(i, *stores[static_cast<size_t>(i)]); });
    for (auto& thread : threads) thread.join();
  }

  TestServer server_{"", spread(4)};
};

TEST_F(Threads, CountExactlyOnSharedKeys) {
  in_threads(8, [](int, Store& store) {
    for (int n = 0; n < 250; ++n) EXPECT_OK(store.add("sum " + std::to_string(n % 7), 1, soon()));
  });
  const auto store = open_or_fail(server_.tcp_url());
  int64_t total = 0;
  for (int i = 0; i < 7; ++i) total += store->add("sum " + std::to_string(i), 0, soon()).value_or(-1'000'000);
  EXPECT_EQ(total, 8 * 250);
}

TEST_F(Threads, SeeAMultiSetWholeOrNotAtAll) {
  std::vector<Key> keys;
  for (int i = 0; i < 12; ++i) keys.push_back("part " + std::to_string(i));
  in_threads(6, [&](int i, Store& store) {
    for (uint8_t n = 0; n < 150; ++n) {
      if (i % 2 == 0) {
        const std::vector<Bytes> values(keys.size(), Bytes{static_cast<uint8_t>(i), n});
        EXPECT_OK(store.multi_set(keys, values, soon()));
      } else {
        const auto values = store.multi_get(keys, soon());
        ASSERT_TRUE(values.has_value());
        EXPECT_EQ(std::count(values->begin(), values->end(), values->front()), std::ssize(keys));
      }
    }
  });
}

TEST_F(Threads, ReleaseWaitsForKeysOfManyShards) {
  constexpr int kRanks = 8, kRounds = 20;
  in_threads(kRanks, [](int i, Store& store) {
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Key> all;
      for (int rank = 0; rank < kRanks; ++rank) all.push_back(std::to_string(round) + "/" + std::to_string(rank));
      EXPECT_OK(store.set(all[static_cast<size_t>(i)], {}, soon()));
      EXPECT_OK(store.wait(all, soon()));
    }
  });
  EXPECT_EQ(server_.server->stat().waiters, 0U);
}

TEST_F(Threads, LoseNoCancellation) {
  in_threads(6, [](int i, Store& store) {
    Random random(static_cast<uint64_t>(i));
    for (int n = 0; n < 150; ++n) {
      const std::vector<Key> keys = {"a" + std::to_string(random.between(0, 5)),
                                     "b" + std::to_string(random.between(0, 5))};
      if (i % 3 == 0) {
        EXPECT_OK(store.set(keys[n % 2], {}, soon()));
        EXPECT_TRUE(store.delete_key(keys[n % 2], soon()).has_value());
      } else {
        (void)store.wait(keys, Deadline::after(std::chrono::microseconds(random.between(0, 300))));
      }
    }
  });
  // A client does not wait for the confirmation of a canceled wait, so the last waiters may still be there for a
  // moment.
  while (server_.server->stat().waiters > 0) std::this_thread::yield();
}

TEST_F(Threads, ForgetManyClientsThatLeaveAtOnce) {
  constexpr int kManyClients = 300;
  std::vector<RawClient> clients;
  for (int i = 0; i < kManyClients; ++i) {
    clients.push_back(torch_client(server_));
    clients.back().send_hex("06020000000000000002000000000000002f6b02000000000000002f6c");  // wait "/k" and "/l"
  }
  const auto store = open_or_fail(server_.tcp_url());
  while (server_.server->stat().waiters < kManyClients) std::this_thread::yield();
  clients.erase(clients.begin() + kManyClients / 2, clients.end());
  while (server_.server->stat().waiters > kManyClients / 2) std::this_thread::yield();
  EXPECT_OK(store->multi_set({"/k", "/l"}, {{}, {}}, soon()));
  for (RawClient& client : clients) EXPECT_EQ(client.receive(1), Bytes{0});
}

TEST_F(Threads, SeparateTheKeysOfEachListener) {
  const Address any = *Address::parse("127.0.0.1:0");
  const auto first = server_.server->add_torch_listener(any, "1/");
  const auto second = server_.server->add_torch_listener(any, "2/");
  ASSERT_TRUE(first && second);
  RawClient one = torch_client(*first), two = torch_client(*second);
  one.send_hex("0402000000000000002f6e0500000000000000");  // add 5 to "/n"
  EXPECT_EQ(one.receive(8), (Bytes{5, 0, 0, 0, 0, 0, 0, 0}));
  two.send_hex("0402000000000000002f6e0700000000000000");
  EXPECT_EQ(two.receive(8), (Bytes{7, 0, 0, 0, 0, 0, 0, 0}));
  for (RawClient* client : {&one, &two}) {
    client->send_hex("07");  // num_keys
    EXPECT_EQ(client->receive(8), (Bytes{1, 0, 0, 0, 0, 0, 0, 0}));
    client->send_hex("11");  // list_keys
    EXPECT_EQ(to_hex(client->receive(18)), "010000000000000002000000000000002f6e");
  }
  EXPECT_EQ(open_or_fail(server_.tcp_url())->list_keys("", soon()), (std::vector<Key>{"1//n", "2//n"}));

  server_.server->remove_torch_listener(*first);
  EXPECT_TRUE(one.is_closed());
  two.send_hex("07");
  EXPECT_EQ(two.receive(8), (Bytes{1, 0, 0, 0, 0, 0, 0, 0}));
  server_.server->remove_torch_listener(*first);
  EXPECT_EQ(server_.server->add_torch_listener(*first, "3/"), *first) << "the port is free again";
  expect_error(server_.server->add_torch_listener(*second, ""), ErrorCode::kUnavailable, second->to_string());
}

TEST_F(Threads, ReportTheirStatistics) {
  const auto store = open_or_fail(server_.tcp_url());
  EXPECT_OK(store->set("k", Bytes(1000), soon()));
  EXPECT_OK(store->set("l", {}, soon()));
  EXPECT_OK(store->queue_push("q", {}, soon()));
  RawClient waiting = torch_client(server_);
  waiting.send_hex("06010000000000000002000000000000002f6b");
  while (server_.server->stat().waiters == 0) std::this_thread::yield();
  const auto stat = store->stat(soon());
  ASSERT_TRUE(stat.has_value()) << stat.error().to_string();
  EXPECT_EQ(stat->clients, 2U);
  EXPECT_EQ(stat->keys, 2U);
  EXPECT_EQ(stat->queues, 1U);
  EXPECT_EQ(stat->waiters, 1U);
  EXPECT_EQ(stat->threads, 4U);
  EXPECT_EQ(stat->operations, 5U);
  EXPECT_EQ(stat->operations_by_kind,
            (std::map<std::string, uint64_t>{{"set", 2}, {"queue_push", 1}, {"wait", 1}, {"stat", 1}}));
  EXPECT_GT(stat->bytes_in, 1000U);
  EXPECT_GT(stat->bytes_out, 0U);
  EXPECT_EQ(stat->messages_in, 5U);
  EXPECT_EQ(stat->messages_out, 3U) << "of the two sets and the push";
  EXPECT_GT(stat->cpu_seconds, 0);
  EXPECT_GT(stat->uptime_seconds, 0);
}

// A server in a process of its own that may open only 40 files. It serves until the parent closes the pipe.
class LimitedServer {
 public:
  LimitedServer() {
    int to_child[2], to_parent[2];
    EXPECT_TRUE(pipe(to_child) == 0 && pipe(to_parent) == 0);
    child_ = fork();
    if (child_ == 0) {
      close(to_child[1]);
      const rlimit limit{40, 40};
      setrlimit(RLIMIT_NOFILE, &limit);
      const TestServer server;
      const uint16_t ports[] = {server.torch_address().port(), server.server->muster_addresses()[0].port()};
      if (write(to_parent[1], ports, sizeof ports) != sizeof ports) _exit(1);
      char byte;
      _exit(read(to_child[0], &byte, 1) == 0 ? 0 : 1);
    }
    life_ = Fd(to_child[1]);
    close(to_child[0]);
    close(to_parent[1]);
    EXPECT_EQ(read(to_parent[0], ports_, sizeof ports_), std::ssize(ports_) * 2);
    close(to_parent[0]);
  }
  ~LimitedServer() {
    life_.reset();
    int status = 0;
    EXPECT_EQ(waitpid(child_, &status, 0), child_);
    EXPECT_EQ(status, 0);
  }
  Address torch() const { return Address::parse("127.0.0.1:0")->with_port(ports_[0]); }
  std::string url() const { return "tcp://127.0.0.1:" + std::to_string(ports_[1]); }

 private:
  pid_t child_ = -1;
  Fd life_;
  uint16_t ports_[2] = {};
};

TEST(FewDescriptors, RefusesNewClientsAndServesTheOthers) {
  const LimitedServer server;
  std::vector<RawClient> clients;
  const Bytes hello = *from_hex("00cef7853c0d01000000");
  const auto is_accepted = [&](RawClient& client) {
    return client.try_send(hello) && client.try_receive(4) == Bytes{1, 0, 0, 0};
  };
  bool refused = false;
  while (!refused && clients.size() < 100) {
    RawClient client(server.torch());
    refused = !is_accepted(client);
    if (!refused) clients.push_back(std::move(client));
  }
  EXPECT_TRUE(refused);
  ASSERT_GT(clients.size(), 3U);
  auto late = open_store(server.url(), test_secret(), Deadline::after(300ms));
  // A server that was busy until the deadline has given no reason, so the client tries again.
  for (const Deadline deadline = test_deadline(); !late && !deadline.passed();) {
    if (late.error().message.find("descriptor") != std::string::npos) break;
    late = open_store(server.url(), test_secret(), Deadline::after(300ms));
  }
  expect_error(late, ErrorCode::kTimeout, "descriptor");
  clients.front().send_hex("0402000000000000002f6e0500000000000000");
  EXPECT_EQ(clients.front().receive(8), (Bytes{5, 0, 0, 0, 0, 0, 0, 0}));
  clients.erase(clients.begin() + 3, clients.end());
  bool again = false;  // the server may not have noticed yet that some clients left
  for (const Deadline deadline = test_deadline(); !again && !deadline.passed();) {
    RawClient client(server.torch());
    again = is_accepted(client);
  }
  EXPECT_TRUE(again);
}

}  // namespace
}  // namespace muster
