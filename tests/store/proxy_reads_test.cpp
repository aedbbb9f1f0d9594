// Tests of the read cache of proxies, and of the leases that it needs.
#include <algorithm>
#include <set>

#include "muster/base/random.h"
#include "store/proxy_fixture.h"

namespace muster {
namespace {

TEST(Proxy, ReadsAKeyOnceForAllItsClients) {
  ProxyFixture node;
  for (ClientId client = 1; client <= 8; ++client) node.get(client, 1, "address");
  EXPECT_EQ(node.up().size(), 1U);
  node.get(9, 1, "address");
  EXPECT_EQ(node.up().size(), 0U) << "it joins the one that is on its way";
  node.settle();
  EXPECT_EQ(node.replies(), Texts{});
  node.set("address", "x");
  EXPECT_EQ(node.replies().size(), 9U);
  node.get(1, 2, "address");
  node.ask(2, 2, StoreOperation::kWait, {"address"});
  node.ask(3, 2, StoreOperation::kCheck, {"address"});
  EXPECT_EQ(node.replies(), (Texts{"1:2=x;", "2:2=0", "3:2=1"}));
  EXPECT_EQ(node.up().size(), 0U);
}

TEST(Proxy, AsksOnlyForTheKeysThatItLacks) {
  ProxyFixture node;
  for (const Key key : {"a", "b", "c"}) node.set(key, "value of " + key);
  node.get(1, 1, "b");
  node.settle();
  node.ask(1, 2, StoreOperation::kMultiGet, {"c", "b", "a", "c"});
  const auto requests = node.up();
  ASSERT_EQ(requests.size(), 1U);
  EXPECT_EQ(requests[0].keys, (std::vector<Key>{"c", "a"}));
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:1=value of b;", "1:2=value of c;value of b;value of a;value of c;"}));
}

TEST(Proxy, NeverWaitsForAnothersKeys) {
  ProxyFixture node;
  node.ask(1, 1, StoreOperation::kMultiGet, {"there", "never"});
  node.settle();
  node.set("there", "x");
  node.get(2, 1, "there");
  node.settle();
  EXPECT_EQ(node.replies(), Texts{"2:1=x;"});
}

TEST(Proxy, GivesAKeyBackBeforeItChanges) {
  ProxyFixture node;
  node.set("k", "old");
  node.get(1, 1, "k");
  node.settle();
  EXPECT_EQ(node.replies(), Texts{"1:1=old;"});
  EXPECT_EQ(node.elsewhere(StoreOperation::kSet, {"k"}, {to_bytes("new")}).size(), 1U) << "a recall, and no answer yet";
  EXPECT_EQ(node.root.apply({StoreOperation::kGet, 1, {"k"}}, kOtherClient)[0].values[0], to_bytes("old"));
  node.get(1, 2, "k");
  node.settle();
  EXPECT_EQ(node.root.apply({StoreOperation::kGet, 1, {"k"}}, kOtherClient)[0].values[0], to_bytes("new"));
  node.replies();
  node.get(1, 3, "k");
  node.settle();
  EXPECT_EQ(node.replies(), Texts{"1:3=new;"});
}

TEST(Proxy, DropsAGrantThatCrossesARecall) {
  ProxyFixture node;
  node.set("k", "old");
  node.ask(1, 1, StoreOperation::kWait, {"k"});
  node.settle();
  node.get(1, 2, "k");
  node.proxy.take_replies();
  node.ask(2, 1, StoreOperation::kMultiGet, {"k", "l"});
  node.up();
  Replies granted = node.root.apply(std::exchange(node.in_flight, {})[0], kProxy);
  node.set("l", "x");
  node.elsewhere(StoreOperation::kSet, {"k"}, {to_bytes("new")});  // the recall arrives before the grant
  node.settle();
  node.down(std::move(granted));
  node.replies();
  node.get(3, 1, "k");
  node.settle();
  EXPECT_EQ(node.replies(), Texts{"3:1=new;"});
}

TEST(Proxy, AnswersLateReadersOfAFetchOnlyWithLeases) {
  ProxyFixture node;
  node.set("k", "old");
  node.lease(Duration{-1});
  node.now = node.now + kLeaseTime;
  node.lease(Duration{0});
  node.get(1, 1, "k");
  node.up();
  Replies old = node.root.apply(std::exchange(node.in_flight, {})[0], kProxy);
  Replies revoked;
  node.root.revoke(kProxy, revoked);
  node.set("k", "new");
  node.get(2, 1, "k");  // invoked when the new value is already there
  EXPECT_EQ(node.up().size(), 0U);
  node.down(std::move(old));
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:1=old;", "2:1=new;"}));
}

TEST(Proxy, ForgetsEverythingWhenItsLeasesEnd) {
  ProxyFixture node;
  node.set("k", "old");
  node.get(1, 1, "k");
  node.settle();
  node.now = node.now + kLeaseTime;
  Replies freed;
  node.root.revoke(kProxy, freed);
  node.set("k", "new");
  node.get(1, 2, "k");
  EXPECT_EQ(node.replies(), Texts{"1:1=old;"});
  node.lease(kLeaseTime);
  node.get(1, 3, "k");
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:2=new;", "1:3=new;"}));
}

TEST(Proxy, AnswersReadsOfAKeyThatItsNodeSet) {
  ProxyFixture node;
  node.ask(1, 1, StoreOperation::kSet, {"k"}, 0, {to_bytes("old")});
  node.settle();
  node.get(2, 1, "k");
  EXPECT_EQ(node.replies(), (Texts{"1:1=0", "2:1=old;"}));
  node.ask(2, 2, StoreOperation::kSet, {"k"}, 0, {to_bytes("ours")});
  EXPECT_EQ(node.up().size(), 2U) << "given back first, so that the server need not ask";
}

TEST(Proxy, DropsASetKeyThatChangedMeanwhile) {
  ProxyFixture node;
  node.ask(1, 1, StoreOperation::kSet, {"k"}, 0, {to_bytes("old")});
  node.up();
  Replies granted = node.root.apply(std::exchange(node.in_flight, {})[0], kProxy);
  EXPECT_TRUE(granted[0].leased);
  node.set("k", "new");  // the recall arrives before the reply to the set
  node.settle();
  node.down(std::move(granted));
  node.get(2, 1, "k");
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:1=0", "2:1=new;"}));
  node.ask(1, 2, StoreOperation::kSet, {"j"}, 0, {to_bytes("first")});
  node.up();
  node.ask(2, 2, StoreOperation::kSet, {"j"}, 0, {to_bytes("second")});
  node.settle();
  node.get(3, 1, "j");
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:2=0", "2:2=0", "3:1=second;"}));
}

TEST(Proxy, GrantsNoLeaseToARemovedProxy) {
  for (const bool gone : {false, true}) {
    ProxyFixture node;
    Request set{StoreOperation::kSet, 1, {"k"}, {to_bytes("old")}};
    set.lease = true;
    node.proxy.submit(std::move(set), 1, node.now);
    node.up();
    if (gone) node.proxy.drop(1);
    node.settle();
    node.set("k", "new");
    EXPECT_EQ(node.proxy.take_replies().size(), gone ? 0U : 2U) << "an answer and a recall";
  }
}

TEST(Proxy, ContinuesAFetchWhenOneReaderLeaves) {
  ProxyFixture node;
  node.get(1, 1, "k");
  node.get(2, 1, "k");
  node.settle();
  node.ask(1, 1, StoreOperation::kCancel, {});
  node.settle();
  EXPECT_EQ(node.replies(), Texts{"1:1=aborted"});
  EXPECT_EQ(node.root.waiters(), 1U);
  node.set("k", "x");
  EXPECT_EQ(node.replies(), Texts{"2:1=x;"});
  node.get(3, 1, "never");
  node.settle();
  node.proxy.drop(3);
  node.settle();
  EXPECT_EQ(node.root.waiters(), 0U) << "the last reader takes the request along";
}

TEST(Proxy, GivesBackLeasesOverTheCacheLimit) {
  Proxy::Options options = ProxyFixture::merging();
  options.max_cached_keys = 2;
  ProxyFixture node(options);
  for (int i = 0; i < 5; ++i) {
    const Key key = std::to_string(i);
    node.set(key, "x");
    node.get(1, RequestId(i), key);
    node.settle();
  }
  EXPECT_EQ(node.replies().size(), 5U);
  EXPECT_EQ(node.elsewhere(StoreOperation::kSet, {"0"}, {to_bytes("y")}).size(), 1U) << "answered at once: not leased";
  node.get(1, 9, "4");
  EXPECT_EQ(node.replies(), Texts{"1:9=x;"});
}

TEST(Proxy, StopsLeasingKeysThatKeepChanging) {
  ProxyFixture node;
  int recalls = 0;
  for (int i = 0; i < 6; ++i) {
    node.elsewhere(StoreOperation::kAdd, {"counter"}, {}, 1);
    node.settle();
    node.get(1, RequestId(i), "counter");
    node.settle();
    recalls += node.root.apply({StoreOperation::kAdd, 1, {"counter"}, {}, 0}, kOtherClient)[0].recall;
    for (const Reply& reply : node.root.apply({StoreOperation::kRelease, 0, {"counter"}}, kProxy)) (void)reply;
    node.lease(Duration{0});
    node.now = node.now + kLeaseTime;
    node.lease(kLeaseTime);
  }
  EXPECT_EQ(recalls, LeaseTable::kMaxRecalls);
}

TEST(Leases, OfOneHolderAreCountedOnce) {
  LeaseTable leases;
  std::vector<Key> freed;
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(leases.grant("k", 7));
    EXPECT_TRUE(leases.grant("k", 7));
    EXPECT_EQ(leases.size(), 1U);
    leases.revoke(7, freed);
  }
  EXPECT_TRUE(leases.grant("k", 7));
  Replies recalls;
  EXPECT_FALSE(leases.recall("k", recalls));
  EXPECT_EQ(recalls.size(), 1U);
  EXPECT_TRUE(leases.release("k", 7));
  EXPECT_EQ(leases.size(), 0U);
}

TEST(Leases, AreForgottenForKeysRecalledLongAgo) {
  LeaseTable leases;
  const auto take_back = [&](const Key& key) {
    Replies recalls;
    EXPECT_TRUE(leases.grant(key, 7));
    EXPECT_FALSE(leases.recall(key, recalls));
    EXPECT_TRUE(leases.release(key, 7));
  };
  constexpr size_t kKeys = 3 * LeaseTable::kMaxIdle;
  for (size_t i = 0; i < kKeys; ++i) take_back(std::to_string(i));
  EXPECT_EQ(leases.records(), LeaseTable::kMaxIdle);
  EXPECT_EQ(leases.holders(), 0U);
  take_back(std::to_string(kKeys - 1));
  EXPECT_FALSE(leases.grant(std::to_string(kKeys - 1), 7)) << "the latest are known for changing";
  take_back("0");
  EXPECT_TRUE(leases.grant("0", 7)) << "it was forgotten, and taken back once since";
}

TEST(Leases, AreForgottenWithTheirHolders) {
  LeaseTable leases;
  std::vector<Key> freed;
  for (ClientId holder = 0; holder < 100; ++holder) {
    for (int i = 0; i < 1000; ++i) EXPECT_TRUE(leases.grant(std::to_string(holder) + "/" + std::to_string(i), holder));
    leases.revoke(holder, freed);
    EXPECT_LE(leases.size(), LeaseTable::kMaxEnded + 1000);
  }
  EXPECT_LE(leases.records(), LeaseTable::kMaxEnded);
  EXPECT_LE(leases.holders(), 2U);
}

// Compares the table with a plain set of (key, holder) pairs.
TEST(Leases, AreRecalledFromAllHoldersOfTheKey) {
  Random random(1);
  LeaseTable leases;
  std::set<std::pair<Key, ClientId>> held;
  std::set<Key> recalling;
  const auto is_held = [&](const Key& key) {
    return std::ranges::any_of(held, [&](const auto& lease) { return lease.first == key; });
  };
  for (int step = 0; step < 50'000; ++step) {
    // A few keys are recalled often. There are so many other keys that the table forgets these.
    const Key key = random.chance(0.5) ? std::to_string(random.below(4)) : "n" + std::to_string(random.below(10'000));
    const ClientId client = random.below(5);
    switch (random.below(4)) {
      case 0:
        if (leases.grant(key, client)) {
          EXPECT_FALSE(recalling.contains(key));
          held.emplace(key, client);
        }
        break;
      case 1: {
        Replies recalls;
        EXPECT_EQ(leases.recall(key, recalls), !is_held(key));
        std::set<ClientId> asked;
        for (const Reply& recall : recalls) asked.insert(recall.client);
        EXPECT_EQ(asked.size(), recalls.size());
        for (ClientId holder = 0; holder < 5 && !recalling.contains(key); ++holder) {
          EXPECT_EQ(asked.contains(holder), held.contains({key, holder}));
        }
        if (!recalls.empty()) recalling.insert(key);
        break;
      }
      case 2:
        held.erase({key, client});
        EXPECT_EQ(leases.release(key, client), recalling.contains(key) && !is_held(key));
        if (!is_held(key)) recalling.erase(key);
        break;
      default: {
        if (!random.chance(0.01)) break;
        std::set<Key> free;
        std::erase_if(held, [&](const auto& lease) { return lease.second == client; });
        for (const Key& one : recalling) {
          if (!is_held(one)) free.insert(one);
        }
        std::vector<Key> freed;
        leases.revoke(client, freed);
        EXPECT_EQ(std::set<Key>(freed.begin(), freed.end()), free);
        for (const Key& one : free) recalling.erase(one);
      }
    }
    ASSERT_FALSE(testing::Test::HasFailure()) << "step " << step;
  }
  EXPECT_LE(leases.size(), held.size() + std::max(LeaseTable::kMaxEnded, leases.size() / 2));
}

}  // namespace
}  // namespace muster
