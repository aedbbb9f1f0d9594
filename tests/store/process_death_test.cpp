// Tests that kill or stop processes: servers while clients wait, and clients in the middle of every operation. The
// survivors must get an error that names the server, and nothing may be left behind.
#include <dirent.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <thread>

#include "muster/store/connect.h"
#include "muster/store/stat.h"
#include "store/expect.h"
#include "store/linear_client.h"
#include "store/store_process.h"
#include "store/test_server.h"
#include "store/torch_client.h"

namespace muster {
namespace {

Deadline soon() { return test_deadline(); }

std::string address_in(const std::string& url) { return url.substr(url.find("://") + 3); }

// One thread for each kind of wait. The constructor returns when all threads are about to wait.
class Waiting {
 public:
  explicit Waiting(const std::string& url) {
    const auto wait = [&](std::function<Result<>(Store&)> body) {
      threads_.emplace_back([this, url, body = std::move(body)] {
        const auto store = open_or_fail(url);
        ++ready_;
        const Result<> outcome = body(*store);
        const std::lock_guard lock(mutex_);
        outcomes_.push_back(outcome);
      });
    };
    wait([](Store& store) { return store.wait({"never"}, soon()); });
    wait([](Store& store) -> Result<> {
      MUSTER_TRY(store.get("never", soon()));
      return {};
    });
    wait([](Store& store) -> Result<> {
      MUSTER_TRY(store.multi_get({"never", "ever"}, soon()));
      return {};
    });
    wait([](Store& store) -> Result<> {
      MUSTER_TRY(store.queue_pop("empty", soon()));
      return {};
    });
    wait([](Store& store) { return store.barrier("barrier", 2, soon()); });
    while (ready_ < std::ssize(threads_)) std::this_thread::yield();
  }
  std::vector<Result<>> outcomes() {
    for (auto& thread : threads_) thread.join();
    return outcomes_;
  }

 private:
  std::atomic<int64_t> ready_ = 0;
  std::mutex mutex_;
  std::vector<Result<>> outcomes_;
  std::vector<std::thread> threads_;
};

void await_stat(const std::string& url, const std::function<bool(const StoreStat&)>& is_so) {
  const auto store = open_or_fail(url);
  const Deadline deadline = soon();
  Result<StoreStat> stat = store->stat(deadline);
  while (stat && !is_so(*stat)) stat = store->stat(deadline);
  if (!stat) ADD_FAILURE() << stat.error().to_string();
}

// Waits until the server has at least `count` waiters. A proxy may merge the waits of several readers of one key, so
// the root may have fewer waiters than there are waiting calls.
void await_waiters(const std::string& url, uint64_t count) {
  await_stat(url, [count](const StoreStat& stat) { return stat.waiters >= count; });
}

void await_no_waiter(const std::string& url) {
  await_stat(url, [](const StoreStat& stat) { return stat.waiters == 0; });
}

TEST(ProcessDeath, EndsEveryWaitWithTheDeadServersName) {
  StoreProcess server;
  Waiting waiting(server.url());
  await_waiters(server.url(), 5);
  server.kill();
  for (const Result<>& outcome : waiting.outcomes()) {
    expect_error(outcome, ErrorCode::kPeerLost, address_in(server.url()));
  }
}

TEST(ProcessDeath, EndsEveryWaitThroughAProxyWhenTheRootDies) {
  StoreProcess root;
  const StoreProcess proxy(root.url());
  Waiting waiting(proxy.url());
  await_waiters(root.url(), 3);
  root.kill();
  for (const Result<>& outcome : waiting.outcomes()) {
    expect_error(outcome, ErrorCode::kPeerLost, address_in(root.url()));
  }
}

TEST(ProcessDeath, WithdrawsTheWaitsOfADeadProxysClients) {
  const StoreProcess root;
  StoreProcess proxy(root.url());
  Waiting waiting(proxy.url());
  await_waiters(root.url(), 3);
  proxy.kill();
  for (const Result<>& outcome : waiting.outcomes()) {
    expect_error(outcome, ErrorCode::kPeerLost, address_in(proxy.url()));
  }
  const auto store = open_or_fail(root.url());
  EXPECT_EQ(store->add("still", 1, soon()), 1) << "the root still works";
  await_no_waiter(root.url());
  expect_error(store->barrier("barrier", 2, Deadline::after(Duration{0})),
               ErrorCode::kTimeout);  // no other caller waits
}

TEST(ProcessDeath, CloseSessionEndsADeadProxysWaitsAtOnce) {
  const StoreProcess root(StoreProcess::Options{.link_grace = std::chrono::hours(1)});
  const SessionId session = fresh_session_id();
  StoreProcess proxy(StoreProcess::Options{.upstream = root.url(), .session = session});
  Waiting waiting(proxy.url());
  await_waiters(root.url(), 3);
  proxy.kill();
  EXPECT_OK(close_session(root.url(), {test_secret(), nullptr}, session, soon()));
  for (const Result<>& outcome : waiting.outcomes()) {
    expect_error(outcome, ErrorCode::kPeerLost, address_in(proxy.url()));
  }
  await_no_waiter(root.url());
}

// Adds one to its own counter until the server is lost. Returns the number of confirmed adds.
int64_t add_until_lost(Store& store, const Key& key, const std::string& lost) {
  for (int64_t done = 0;; ++done) {
    const auto added = store.add(key, 1, soon());
    if (!added) {
      expect_error(added, ErrorCode::kPeerLost, lost);
      return done;
    }
    EXPECT_EQ(*added, done + 1);
  }
}

TEST(ProcessDeath, ReportsAMiddleProxysDeathToItsClientsOnly) {
  const StoreProcess root;
  StoreProcess middle(root.url());
  const StoreProcess below(middle.url()), beside(root.url());
  std::atomic<int> at_work = 0;
  std::array<int64_t, 4> confirmed{};
  std::vector<std::thread> workers;
  for (size_t i = 0; i < confirmed.size(); ++i) {
    workers.emplace_back([&, i] {
      const auto store = open_or_fail(i % 2 == 0 ? below.url() : middle.url());
      EXPECT_OK(store->set("ready " + std::to_string(i), {}, soon()));
      ++at_work;
      confirmed[i] = add_until_lost(*store, std::to_string(i), address_in(middle.url()));
    });
  }
  const auto elsewhere = open_or_fail(beside.url());
  while (at_work < std::ssize(confirmed)) std::this_thread::yield();
  for (int i = 1; i <= 100; ++i) EXPECT_EQ(elsewhere->add("elsewhere", 1, soon()), i);
  middle.kill();
  for (int i = 101; i <= 200; ++i) EXPECT_EQ(elsewhere->add("elsewhere", 1, soon()), i);
  for (auto& worker : workers) worker.join();
  for (size_t i = 0; i < confirmed.size(); ++i) {
    const auto sum = elsewhere->add(std::to_string(i), 0, soon());
    ASSERT_TRUE(sum.has_value()) << sum.error().to_string();
    EXPECT_GE(*sum, confirmed[i]) << "nothing that was confirmed is lost";
    EXPECT_LE(*sum, confirmed[i] + 1) << "at most the one on its way was done";
  }
}

TEST(ProcessDeath, ReportsAStoppedServerAsATimeout) {
  const StoreProcess root;
  const StoreProcess proxy(root.url());
  for (const StoreProcess* asked : {&root, &proxy}) {
    const auto store = open_or_fail(asked->url());
    const Key key = "of " + asked->url();
    EXPECT_OK(store->set(key, as_bytes("v"), soon()));
    root.stop();
    expect_error(store->add(key + "'s counter", 1, Deadline::after(50ms)), ErrorCode::kTimeout,
                 address_in(asked->url()));
    expect_error(store->get("never", Deadline::after(50ms)), ErrorCode::kTimeout, address_in(asked->url()));
    root.resume();
    EXPECT_EQ(store->get(key, soon()), to_bytes("v"));
    EXPECT_EQ(store->add(key + "'s counter", 1, soon()), 2) << "the first add was late, not lost";
  }
}

int open_descriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// Every operation once.
std::vector<Request> all_operations() {
  return {{StoreOperation::kSet, 1, {"k"}, {to_bytes("v")}},
          {StoreOperation::kGet, 1, {"never"}},
          {StoreOperation::kCompareSet, 1, {"k"}, {{}, to_bytes("w")}},
          {StoreOperation::kAdd, 1, {"n"}, {}, 1},
          {StoreOperation::kCheck, 1, {"k"}},
          {StoreOperation::kWait, 1, {"never"}},
          {StoreOperation::kDelete, 1, {"k"}},
          {StoreOperation::kNumKeys, 1},
          {StoreOperation::kAppend, 1, {"k"}, {to_bytes("+")}},
          {StoreOperation::kMultiGet, 1, {"k", "never"}},
          {StoreOperation::kMultiSet, 1, {"k", "l"}, {to_bytes("v"), to_bytes("w")}},
          {StoreOperation::kQueuePush, 1, {"q"}, {to_bytes("v")}},
          {StoreOperation::kQueuePop, 1, {"no queue"}},
          {StoreOperation::kQueueLength, 1, {"q"}},
          {StoreOperation::kListKeys, 1, {""}},
          {StoreOperation::kBarrier, 1, {"b"}, {}, 1000000}};
}

// Expects that no waiter and no descriptor of a dead client is left, once the server has noticed its death.
void expect_no_clients(Store& store, int descriptors) {
  const Deadline deadline = soon();
  while (!deadline.passed()) {
    const auto stat = store.stat(soon());
    ASSERT_TRUE(stat.has_value()) << stat.error().to_string();
    if (stat->waiters == 0 && open_descriptors() <= descriptors) return;
  }
  ADD_FAILURE() << store.stat(soon())->waiters << " waiters and " << open_descriptors() << " descriptors, not "
                << descriptors;
}

TEST(ProcessDeath, LeavesNoStateOfAThousandDeadClients) {
  const TestServer root;
  const TestServer proxy(root.tcp_url());
  const auto store = open_or_fail(root.unix_url());
  const int descriptors = open_descriptors();
  for (int round = 0; round < 32; ++round) {
    const TestServer& asked = round % 2 == 0 ? root : proxy;
    for (const Request& request : all_operations()) {
      send_and_die(round % 4 < 2 ? asked.tcp_url() : asked.unix_url(), test_secret(), request);
      Request without_wait = request;
      without_wait.immediate = true;
      TorchClient(asked.torch_address()).send(*torch_request(without_wait));
    }
  }
  expect_no_clients(*store, descriptors);
  EXPECT_EQ(store->check({"never"}, soon()), false);
  expect_error(store->barrier("b", 2, Deadline::after(Duration{0})), ErrorCode::kTimeout);  // no arrival is left
}

}  // namespace
}  // namespace muster
