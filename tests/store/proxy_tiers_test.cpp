// Tests proxies over real sockets, with links that break.

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <charconv>
#include <deque>
#include <set>
#include <thread>

#include "muster/store/connect.h"
#include "muster/store/protocol/messages.h"
#include "muster/store/server/backend.h"
#include "muster/store/session.h"
#include "store/expect.h"
#include "store/fault_relay.h"
#include "store/raw_client.h"
#include "store/test_server.h"

namespace muster {
namespace {

Deadline soon() { return test_deadline(); }

StoreServerOptions tiered(Duration link_grace = 30s) {
  StoreServerOptions options;
  options.tiered = true;
  options.link_grace = link_grace;
  return options;
}

int number_in(ByteView text) {
  int number = -1;
  const auto* begin = reinterpret_cast<const char*>(text.data());
  std::from_chars(begin, begin + text.size(), number);
  return number;
}

void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (auto& thread : threads) thread.join();
}

// Runs workers that change the store, and counts the changes afterwards. Each change must be done exactly once, even if
// links break.
void run_workers(const std::vector<std::string>& urls, int rounds) {
  const int workers = static_cast<int>(urls.size());
  std::atomic<int> wins = 0;
  std::mutex mutex;
  std::multiset<std::string> taken;
  in_threads(workers, [&](int me) {
    const auto store = open_or_fail(urls[size_t(me)]);
    for (int round = 0; round < rounds; ++round) {
      const std::string name = std::to_string(round);
      EXPECT_OK(store->add("sum", me + 1, soon()));
      EXPECT_OK(store->queue_push("jobs", to_bytes(std::to_string(me) + "/" + name), soon()));
      const Bytes mine = to_bytes(std::to_string(me));
      const auto winner = store->compare_set("winner " + name, {}, mine, soon());
      ASSERT_TRUE(winner.has_value()) << winner.error().to_string();
      wins += winner == mine;
      EXPECT_EQ(store->get("winner " + name, soon()), *winner);
      EXPECT_OK(store->append("log", as_bytes("x"), soon()));
      const auto job = store->queue_pop("jobs", soon());
      ASSERT_TRUE(job.has_value()) << job.error().to_string();
      const std::lock_guard lock(mutex);
      taken.insert(to_string(*job));
    }
    EXPECT_OK(store->barrier("done", workers, soon()));
  });
  EXPECT_EQ(wins, rounds);
  EXPECT_EQ(taken.size(), size_t(workers * rounds));
  EXPECT_EQ(std::set(taken.begin(), taken.end()).size(), taken.size()) << "no job was taken twice";
  const auto store = open_or_fail(urls[0]);
  EXPECT_EQ(store->add("sum", 0, soon()), rounds * workers * (workers + 1) / 2);
  EXPECT_EQ(store->get("log", soon())->size(), size_t(workers * rounds));
  EXPECT_EQ(store->queue_length("jobs", soon()), 0);
}

TEST(ProxyTiers, DoEverythingOnceWhenLinksAreCut) {
  for (const bool merge : {false, true}) {
    const TestServer root;
    RelayFaults faults;
    faults.cut = 0.05;
    faults.split = 0.2;
    FaultRelay to_root(root.server->muster_addresses()[0], faults, 7 + merge);
    StoreServerOptions options = tiered();
    options.tiered = merge;
    const TestServer middle(to_root.url(), options);
    FaultRelay to_middle(middle.server->muster_addresses()[0], faults, 9 + merge);
    const TestServer leaf(to_middle.url(), options);
    run_workers({leaf.unix_url(), leaf.unix_url(), middle.unix_url(), root.unix_url()}, 20);
    EXPECT_GT(to_root.cuts() + to_middle.cuts(), 0U) << "or this proves nothing";
  }
}

TEST(ProxyTiers, KeepWaitsWhileThereIsNoLink) {
  const TestServer root;
  FaultRelay relay(root.server->muster_addresses()[0], {}, 1);
  const TestServer proxy(relay.url(), tiered());
  const auto far = open_or_fail(root.unix_url());
  in_threads(4, [&](int me) {
    const auto store = open_or_fail(me == 0 ? root.unix_url() : proxy.unix_url());
    if (me == 0) {
      while (root.server->stat().waiters < 3) std::this_thread::yield();
      relay.hold(true);
      relay.cut_all();
      EXPECT_OK(store->set("key", as_bytes("v"), soon()));
      EXPECT_OK(store->queue_push("queue", as_bytes("q"), soon()));
      relay.hold(false);
      EXPECT_OK(store->barrier("b", 2, soon()));
    } else if (me == 1) {
      EXPECT_EQ(store->get("key", soon()), to_bytes("v"));
    } else if (me == 2) {
      EXPECT_EQ(store->queue_pop("queue", soon()), to_bytes("q"));
    } else {
      EXPECT_OK(store->barrier("b", 2, soon()));
    }
  });
}

TEST(ProxyTiers, ReportAServerThatDoesNotComeBack) {
  const TestServer root("", tiered(300ms));
  FaultRelay relay(root.server->muster_addresses()[0], {}, 1);
  const TestServer proxy(relay.url(), tiered(300ms));
  const auto store = open_or_fail(proxy.unix_url());
  relay.hold(true);
  relay.cut_all();
  expect_error(store->get("never", soon()), ErrorCode::kPeerLost, relay.url().substr(6));
  expect_error(store->set("k", {}, soon()), ErrorCode::kPeerLost, relay.url().substr(6));
  const auto far = open_or_fail(root.unix_url());
  while (root.server->stat().clients > 1) std::this_thread::yield();  // the root must end the session too
}

TEST(ProxyTiers, NoticeARestartedServer) {
  auto root = std::make_unique<TestServer>();
  const Address address = root->server->muster_addresses()[0];
  FaultRelay relay(address, {}, 1);
  const TestServer proxy(relay.url(), tiered());
  const auto store = open_or_fail(proxy.unix_url());
  EXPECT_OK(store->set("k", as_bytes("v"), soon()));
  relay.hold(true);  // otherwise the proxy's connection is refused, which shows that there is no server
  root.reset();
  StoreServerOptions options;
  options.credentials.secret = test_secret();
  options.muster_listen = {address};
  const auto again = StoreServer::start(options, soon());
  ASSERT_TRUE(again.has_value()) << again.error().to_string();
  relay.hold(false);
  expect_error(store->get("never", soon()), ErrorCode::kPeerLost, "restarted");
  while ((*again)->stat().clients > 0) std::this_thread::yield();  // the proxy is alive, but must have closed the link
}

TEST(ProxyTiers, EndTheSessionOfASilentProxy) {
  const TestServer root("", tiered(300ms));
  std::vector<Connection> silent;
  for (int i = 0; i < 3; ++i)
    silent.push_back(
        connect_to_store(root.tcp_url(), {test_secret(), nullptr}, soon(), proxy_hello(fresh_session_id())).value());
  while (root.server->stat().clients < 3) std::this_thread::yield();
  while (root.server->stat().clients > 0) std::this_thread::yield();
  EXPECT_OK(open_or_fail(root.tcp_url())->set("k", as_bytes("v"), soon()));
}

TEST(ProxyTiers, AskForANodesStartUpOnce) {
  constexpr int kWorkers = 8, kKeys = 200;
  const TestServer root;
  const TestServer proxy(root.tcp_url(), tiered());
  std::vector<Key> keys;
  for (int i = 0; i < kKeys; ++i) keys.push_back("address/" + std::to_string(i));
  EXPECT_OK(open_or_fail(root.unix_url())->multi_set(keys, std::vector<Bytes>(kKeys, Bytes(64)), soon()));
  const StoreStat before = root.server->stat();
  in_threads(kWorkers, [&](int) {
    const auto store = open_or_fail(proxy.unix_url());
    for (const Key& key : keys) EXPECT_OK(store->get(key, soon()));
    EXPECT_EQ(store->multi_get(keys, soon())->size(), size_t(kKeys));
    EXPECT_OK(store->wait(keys, soon()));
    EXPECT_OK(store->barrier("b", kWorkers, soon()));
  });
  const uint64_t operations = root.server->stat().operations - before.operations;
  EXPECT_LE(operations, uint64_t(kKeys + 3 * kWorkers)) << "each key is read about once for all clients";
}

TEST(ProxyTiers, NeverReadAnOldValue) {
  const TestServer root;
  const TestServer left(root.tcp_url(), tiered()), right(root.unix_url(), tiered());
  std::atomic<int> published = 0;
  in_threads(6, [&](int me) {
    const auto store = open_or_fail(me % 2 == 0 ? left.unix_url() : right.unix_url());
    for (int version = 1; version <= 60; ++version) {
      const Key key = "key " + std::to_string(version % 3 + version / 20 * 3);
      if (me == 0) {
        EXPECT_OK(store->set(key, to_bytes(std::to_string(version)), soon()));
        published = version;
      } else {
        const int known = published;
        if (known == 0) continue;
        const Key last = "key " + std::to_string(known % 3 + known / 20 * 3);
        const auto value = store->get(last, soon());
        ASSERT_TRUE(value.has_value());
        EXPECT_GE(number_in(*value), known) << "a read that began after the change must see it";
      }
    }
  });
}

// PyTorch's client does not wait for its sets. The client's next request must see the sets, even if other clients hold
// leases.
TEST(ProxyTiers, LetNoRequestOfATCPStoreClientOvertakeItsSet) {
  const TestServer root;
  const TestServer mine(root.tcp_url(), tiered()), other(root.tcp_url(), tiered());
  std::atomic<bool> over = false;
  in_threads(2, [&](int me) {
    if (me == 1) {
      const auto reader = open_or_fail(other.unix_url());
      while (!over) EXPECT_TRUE(reader->check({"/k0", "/k1", "/k2", "/k3"}, soon()).has_value());
      return;
    }
    RawClient client = torch_client(mine.torch_address());
    const auto near = open_or_fail(mine.unix_url()), far = open_or_fail(other.unix_url());
    for (char round = '0'; round <= '9'; ++round) {
      for (char key = '0'; key <= '3'; ++key) {
        const Key name = std::string("/k") + key;
        Writer requests;  // SET key round, GET key
        requests.put(uint8_t{1}).put(uint64_t{3}).put_raw(as_bytes(name)).put(uint64_t{1}).put(round);
        requests.put(uint8_t{3}).put(uint64_t{3}).put_raw(as_bytes(name));
        client.send(requests.bytes());
        EXPECT_EQ(client.receive(9), (Bytes{1, 0, 0, 0, 0, 0, 0, 0, uint8_t(round)}));
        EXPECT_EQ(near->get(name, soon()), Bytes{uint8_t(round)});
        EXPECT_EQ(far->get(name, soon()), Bytes{uint8_t(round)});
      }
    }
    over = true;
  });
}

TEST(ProxyTiers, AnswerEachOfManyProxies) {
  const TestServer root;
  const auto loop = Loop::create();
  ASSERT_TRUE(loop.has_value());
  StoreServerOptions options = tiered();
  options.credentials.secret = test_secret();
  options.upstream = root.tcp_url();
  constexpr size_t kProxies = 100;
  size_t answered = 0;
  std::vector<std::unique_ptr<Backend>> proxies;
  for (size_t i = 0; i < kProxies; ++i) {
    auto proxy = upstream_backend(**loop, options, soon(), [&](Replies&& replies) { answered += replies.size(); });
    ASSERT_TRUE(proxy.has_value()) << proxy.error().to_string();
    proxies.push_back(std::move(*proxy));
  }
  for (size_t round = 1; round <= 3; ++round) {
    for (const auto& proxy : proxies) proxy->submit({StoreOperation::kAdd, round, {"n"}, {}, 1}, 1);
    EXPECT_OK((*loop)->run_until([&] { return answered == round * kProxies; }, soon()));
  }
  EXPECT_EQ(open_or_fail(root.unix_url())->add("n", 0, soon()), 300);
}

// A proxy holds a lease and then sends nothing more.
TEST(ProxyTiers, ChangeAKeyThatADeadProxyHolds) {
  StoreServerOptions options;
  options.lease_time = 400ms;
  const TestServer root("", options);
  const auto store = open_or_fail(root.unix_url());
  EXPECT_OK(store->set("k", as_bytes("old"), soon()));
  FaultRelay relay(root.server->muster_addresses()[0], {}, 1);
  const TestServer proxy(relay.url(), tiered());
  const auto near = open_or_fail(proxy.unix_url());
  EXPECT_EQ(near->get("k", soon()), to_bytes("old"));
  relay.hold(true);
  EXPECT_OK(store->set("k", as_bytes("new"), soon()));  // waits until the lease has ended, but no longer
  std::thread late([&] { EXPECT_EQ(near->get("k", soon()), to_bytes("new")); });
  relay.cut_all();
  relay.hold(false);
  late.join();
}

// A proxy's end of a session that the test drives directly.
class RawProxy {
 public:
  explicit RawProxy(const TestServer& root)
      : connection_(connect_to_store(root.tcp_url(), {test_secret(), nullptr}, soon(), proxy_hello(fresh_session_id()))
                        .value()) {
    write(encode(SessionOpen{}));
    EXPECT_TRUE(decode_session_opened(next_frame()).has_value());
    EXPECT_OK(session_.connect(0));
  }
  void send_requests(const std::vector<Request>& requests) {
    for (const Request& request : requests) session_.put(*encode_request(request));
    Bytes out;
    session_.write(out, {});
    write(out);
  }
  /// The next reply or recall.
  Reply next_reply() {
    while (replies_.empty()) {
      const auto received = session_.receive(next_frame());
      EXPECT_OK(for_each_message(received->messages(), [&](const FrameHeader& header, ByteView payload) -> Result<> {
        replies_.push_back(*decode_reply(header, payload));
        return {};
      }));
    }
    Reply reply = std::move(replies_.front());
    replies_.pop_front();
    return reply;
  }
  void end() { write(encode_session_close()); }
  /// Sends keepalives until the server has closed the link. False after a minute.
  bool is_cut_off() {
    Bytes beat;
    session_.write_keepalive(beat, {});
    return muster::is_cut_off(connection_.stream->fd(), beat);
  }

 private:
  void write(ByteView bytes) {
    EXPECT_EQ(send(connection_.stream->fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL), std::ssize(bytes));
  }
  Frame next_frame() {
    while (true) {
      if (auto frame = parser_.next().value()) return std::move(*frame);
      pollfd poll{connection_.stream->fd(), POLLIN, 0};
      EXPECT_EQ(::poll(&poll, 1, 60000), 1);
      uint8_t bytes[4096];
      const iovec into{bytes, sizeof bytes};
      parser_.feed({bytes, connection_.stream->read({&into, 1}).value()});
    }
  }

  Connection connection_;
  ReliableSession session_;
  FrameParser parser_{kMaxSessionFrameBytes};
  std::deque<Reply> replies_;
};

// The multi_set below waits for the proxy's lease of "held". When the proxy ends, the multi_set is carried out and sets
// "awaited", for which the proxy also waited. This must not grant a new lease to the dead proxy.
TEST(ProxyTiers, LeaseNothingToAProxyThatHasEnded) {
  const TestServer root;
  const auto store = open_or_fail(root.unix_url());
  EXPECT_OK(store->set("held", as_bytes("old"), soon()));
  RawProxy proxy(root);
  Request held{StoreOperation::kGet, 1, {"held"}}, awaited{StoreOperation::kGet, 2, {"awaited"}};
  held.lease = awaited.lease = true;
  proxy.send_requests({held, awaited});
  EXPECT_TRUE(proxy.next_reply().leased);
  std::thread writer([&] {
    const auto mine = open_or_fail(root.unix_url());
    EXPECT_OK(mine->multi_set({"held", "awaited"}, {to_bytes("new"), to_bytes("new")}, soon()));
  });
  EXPECT_TRUE(proxy.next_reply().recall);
  proxy.end();
  writer.join();
  EXPECT_OK(store->set("awaited", as_bytes("newer"), Deadline::after(20s)));
}

// The root learns at once that the middle proxy has ended. The proxy below does not, and continues to answer from the
// leases that were passed on to it.
TEST(ProxyTiers, ChangeAKeyThatProxiesBelowADeadOneHold) {
  for (const bool held_before : {false, true}) {
    StoreServerOptions options;
    options.lease_time = 1s;
    const TestServer root("", options);
    auto middle = std::make_unique<TestServer>(root.tcp_url(), tiered());
    const auto store = open_or_fail(root.unix_url());
    EXPECT_OK(store->set("k", as_bytes("old"), soon()));
    if (held_before) {
      EXPECT_EQ(open_or_fail(middle->unix_url())->get("k", soon()), to_bytes("old"));
    }
    const TestServer leaf(middle->tcp_url(), tiered());
    const auto near = open_or_fail(leaf.unix_url());
    EXPECT_EQ(near->get("k", soon()), to_bytes("old"));
    middle.reset();
    EXPECT_OK(store->set("k", as_bytes("new"), soon()));
    const auto seen = near->get("k", soon());
    if (seen) {
      EXPECT_EQ(seen, to_bytes("new"));
    } else {
      expect_error(seen, ErrorCode::kPeerLost);
    }
  }
}

TEST(ProxyTiers, LeaseAgainToAProxyThatWasSilent) {
  StoreServerOptions options;
  options.lease_time = 400ms;  // much less than the time between two keepalives
  const TestServer root("", options);
  const TestServer proxy(root.tcp_url(), tiered());
  const auto store = open_or_fail(root.unix_url());
  EXPECT_OK(store->set("k", as_bytes("v"), soon()));
  const auto near = open_or_fail(proxy.unix_url());
  EXPECT_EQ(near->get("k", soon()), to_bytes("v"));
  expect_error(store->wait({"nothing"}, Deadline::after(1200ms)), ErrorCode::kTimeout);
  const Deadline deadline = soon();
  uint64_t asked = 0;
  do {
    asked = root.server->stat().operations_by_kind["get"];
    EXPECT_EQ(near->get("k", soon()), to_bytes("v"));
  } while (root.server->stat().operations_by_kind["get"] != asked && !deadline.passed());
  EXPECT_FALSE(deadline.passed()) << "every read goes to the root";
}

TEST(ProxyTiers, CloseAProxyThatNeverReads) {
  StoreServerOptions options;
  options.max_reply_queue = 1 << 20;
  options.stall_timeout = 50ms;
  const TestServer root("", options);
  const auto store = open_or_fail(root.unix_url());
  EXPECT_OK(store->set("big", Bytes(1 << 20), soon()));
  RawProxy non_reading(root);
  std::vector<Request> requests;
  for (RequestId id = 1; id <= 50; ++id) requests.push_back({StoreOperation::kGet, id, {"big"}});
  non_reading.send_requests(requests);
  EXPECT_TRUE(non_reading.is_cut_off());
  EXPECT_OK(store->set("k", {}, soon()));
}

TEST(ProxyTiers, CloseAProxyThatBreaksTheProtocol) {
  const TestServer root;
  const SessionId id = fresh_session_id();
  for (const Bytes& wrong : {encode_frame(1, {}), encode_frame(192, Bytes(3)), encode_frame(194, Bytes(40)),
                             encode_frame(192, Bytes(10, 9)), Bytes(8, 0xff)}) {
    const auto connection = connect_to_store(root.tcp_url(), {test_secret(), nullptr}, soon(), proxy_hello(id));
    ASSERT_TRUE(connection.has_value()) << connection.error().to_string();
    const iovec segment{const_cast<uint8_t*>(wrong.data()), wrong.size()};
    EXPECT_TRUE(connection->stream->write({&segment, 1}).has_value());
    uint8_t byte = 0;
    const iovec into{&byte, 1};
    Result<size_t> n = size_t{0};
    while (n && *n == 0) n = connection->stream->read({&into, 1});
    EXPECT_FALSE(n.has_value()) << "closed without a word";
  }
  while (root.server->stat().clients > 0) std::this_thread::yield();
  EXPECT_OK(open_or_fail(root.unix_url())->set("k", {}, soon()));
}

}  // namespace
}  // namespace muster
