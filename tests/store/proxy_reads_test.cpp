// What proxies keep of what they read, and the leases that let them.
#include <algorithm>
#include <set>

#include "muster/base/random.h"
#include "store/proxy_fixture.h"

namespace muster {
namespace {

TEST(Proxy, ReadsAKeyOnceForAllItsClients) {
  World world;
  for (ClientId client = 1; client <= 8; ++client) world.get(client, 1, "address");
  EXPECT_EQ(world.up().size(), 1U);
  world.get(9, 1, "address");
  EXPECT_EQ(world.up().size(), 0U) << "it joins the one that is on its way";
  world.settle();
  EXPECT_EQ(world.heard(), Heard{});
  world.set("address", "x");
  EXPECT_EQ(world.heard().size(), 9U);
  world.get(1, 2, "address");
  world.ask(2, 2, StoreOperation::kWait, {"address"});
  world.ask(3, 2, StoreOperation::kCheck, {"address"});
  EXPECT_EQ(world.heard(), (Heard{"1:2=x;", "2:2=0", "3:2=1"}));
  EXPECT_EQ(world.up().size(), 0U);
}

TEST(Proxy, AsksOnlyForTheKeysThatItLacks) {
  World world;
  for (const Key key : {"a", "b", "c"}) world.set(key, "value of " + key);
  world.get(1, 1, "b");
  world.settle();
  world.ask(1, 2, StoreOperation::kMultiGet, {"c", "b", "a", "c"});
  const auto requests = world.up();
  ASSERT_EQ(requests.size(), 1U);
  EXPECT_EQ(requests[0].keys, (std::vector<Key>{"c", "a"}));
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:1=value of b;", "1:2=value of c;value of b;value of a;value of c;"}));
}

TEST(Proxy, NeverWaitsForAnothersKeys) {
  World world;
  world.ask(1, 1, StoreOperation::kMultiGet, {"there", "never"});
  world.settle();
  world.set("there", "x");
  world.get(2, 1, "there");
  world.settle();
  EXPECT_EQ(world.heard(), Heard{"2:1=x;"});
}

TEST(Proxy, GivesAKeyBackBeforeItChanges) {
  World world;
  world.set("k", "old");
  world.get(1, 1, "k");
  world.settle();
  EXPECT_EQ(world.heard(), Heard{"1:1=old;"});
  EXPECT_EQ(world.elsewhere(StoreOperation::kSet, {"k"}, {to_bytes("new")}).size(), 1U)
      << "a recall, and no answer yet";
  EXPECT_EQ(world.root.apply({StoreOperation::kGet, 1, {"k"}}, kStranger)[0].values[0], to_bytes("old"));
  world.get(1, 2, "k");
  world.settle();
  EXPECT_EQ(world.root.apply({StoreOperation::kGet, 1, {"k"}}, kStranger)[0].values[0], to_bytes("new"));
  world.heard();
  world.get(1, 3, "k");
  world.settle();
  EXPECT_EQ(world.heard(), Heard{"1:3=new;"});
}

TEST(Proxy, KeepsNoGrantThatCrossesARecall) {
  World world;
  world.set("k", "old");
  world.ask(1, 1, StoreOperation::kWait, {"k"});
  world.settle();
  world.get(1, 2, "k");
  world.proxy.take_replies();
  world.ask(2, 1, StoreOperation::kMultiGet, {"k", "l"});
  world.up();
  Replies granted = world.root.apply(std::exchange(world.travelling, {})[0], kProxy);
  world.set("l", "x");
  world.elsewhere(StoreOperation::kSet, {"k"}, {to_bytes("new")});  // the recall comes first
  world.settle();
  world.down(std::move(granted));
  world.heard();
  world.get(3, 1, "k");
  world.settle();
  EXPECT_EQ(world.heard(), Heard{"3:1=new;"});
}

TEST(Proxy, AnswersLateReadersOfAFetchOnlyWithLeases) {
  World world;
  world.set("k", "old");
  world.lease(Duration{-1});
  world.now = world.now + kLeaseTime;
  world.lease(Duration{0});
  world.get(1, 1, "k");
  world.up();
  Replies old = world.root.apply(std::exchange(world.travelling, {})[0], kProxy);
  Replies revoked;
  world.root.revoke(kProxy, revoked);
  world.set("k", "new");
  world.get(2, 1, "k");  // invoked when the new value is there
  EXPECT_EQ(world.up().size(), 0U);
  world.down(std::move(old));
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:1=old;", "2:1=new;"}));
}

TEST(Proxy, ForgetsEverythingWhenItsLeasesEnd) {
  World world;
  world.set("k", "old");
  world.get(1, 1, "k");
  world.settle();
  world.now = world.now + kLeaseTime;
  Replies freed;
  world.root.revoke(kProxy, freed);
  world.set("k", "new");
  world.get(1, 2, "k");
  EXPECT_EQ(world.heard(), Heard{"1:1=old;"});
  world.lease(kLeaseTime);
  world.get(1, 3, "k");
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:2=new;", "1:3=new;"}));
}

TEST(Proxy, AnswersReadersOfAKeyThatItsNodeMade) {
  World world;
  world.ask(1, 1, StoreOperation::kSet, {"k"}, 0, {to_bytes("old")});
  world.settle();
  world.get(2, 1, "k");
  EXPECT_EQ(world.heard(), (Heard{"1:1=0", "2:1=old;"}));
  world.ask(2, 2, StoreOperation::kSet, {"k"}, 0, {to_bytes("ours")});
  EXPECT_EQ(world.up().size(), 2U) << "given back first, so that the server need not ask";
}

TEST(Proxy, KeepsNothingOfAKeyThatChangedSinceItWasMade) {
  World world;
  world.ask(1, 1, StoreOperation::kSet, {"k"}, 0, {to_bytes("old")});
  world.up();
  Replies granted = world.root.apply(std::exchange(world.travelling, {})[0], kProxy);
  EXPECT_TRUE(granted[0].leased);
  world.set("k", "new");  // its recall is faster
  world.settle();
  world.down(std::move(granted));
  world.get(2, 1, "k");
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:1=0", "2:1=new;"}));
  world.ask(1, 2, StoreOperation::kSet, {"j"}, 0, {to_bytes("first")});
  world.up();
  world.ask(2, 2, StoreOperation::kSet, {"j"}, 0, {to_bytes("second")});
  world.settle();
  world.get(3, 1, "j");
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:2=0", "2:2=0", "3:1=second;"}));
}

TEST(Proxy, GrantsNoLeaseToAProxyBelowThatIsGone) {
  for (const bool gone : {false, true}) {
    World world;
    Request set{StoreOperation::kSet, 1, {"k"}, {to_bytes("old")}};
    set.lease = true;
    world.proxy.submit(std::move(set), 1, world.now);
    world.up();
    if (gone) world.proxy.drop(1, world.now);
    world.settle();
    world.set("k", "new");
    EXPECT_EQ(world.proxy.take_replies().size(), gone ? 0U : 2U) << "an answer and a recall";
  }
}

TEST(Proxy, GoesOnForTheOthersWhenOneReaderLeaves) {
  World world;
  world.get(1, 1, "k");
  world.get(2, 1, "k");
  world.settle();
  world.ask(1, 1, StoreOperation::kCancel, {});
  world.settle();
  EXPECT_EQ(world.heard(), Heard{"1:1=aborted"});
  EXPECT_EQ(world.root.waiters(), 1U);
  world.set("k", "x");
  EXPECT_EQ(world.heard(), Heard{"2:1=x;"});
  world.get(3, 1, "never");
  world.settle();
  world.proxy.drop(3, world.now);
  world.settle();
  EXPECT_EQ(world.root.waiters(), 0U) << "the last reader takes the request along";
}

TEST(Proxy, GivesBackWhatDoesNotFit) {
  Proxy::Options options = World::merging();
  options.max_cached_keys = 2;
  World world(options);
  for (int i = 0; i < 5; ++i) {
    const Key key = std::to_string(i);
    world.set(key, "x");
    world.get(1, RequestId(i), key);
    world.settle();
  }
  EXPECT_EQ(world.heard().size(), 5U);
  EXPECT_EQ(world.elsewhere(StoreOperation::kSet, {"0"}, {to_bytes("y")}).size(), 1U) << "answered at once: not leased";
  world.get(1, 9, "4");
  EXPECT_EQ(world.heard(), Heard{"1:9=x;"});
}

TEST(Proxy, StopsLeasingWhatChangesAgainAndAgain) {
  World world;
  int recalls = 0;
  for (int i = 0; i < 6; ++i) {
    world.elsewhere(StoreOperation::kAdd, {"counter"}, {}, 1);
    world.settle();
    world.get(1, RequestId(i), "counter");
    world.settle();
    recalls += world.root.apply({StoreOperation::kAdd, 1, {"counter"}, {}, 0}, kStranger)[0].recall;
    for (const Reply& reply : world.root.apply({StoreOperation::kRelease, 0, {"counter"}}, kProxy)) (void)reply;
    world.lease(Duration{0});
    world.now = world.now + kLeaseTime;
    world.lease(kLeaseTime);
  }
  EXPECT_EQ(recalls, LeaseTable::kMaxRecalls);
}

TEST(Leases, OfOneHolderCountOnceHoweverOftenTheyEnd) {
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

TEST(Leases, AreForgottenOfKeysThatWereTakenBackLongAgo) {
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

// Against a plain set of who holds what.
TEST(Leases, RecallThoseWhoHoldTheKeyAndNobodyElse) {
  Random random(1);
  LeaseTable leases;
  std::set<std::pair<Key, ClientId>> held;
  std::set<Key> recalling;
  const auto is_held = [&](const Key& key) {
    return std::ranges::any_of(held, [&](const auto& lease) { return lease.first == key; });
  };
  for (int step = 0; step < 50'000; ++step) {
    // Few keys that are taken back often, and so many others that those are forgotten.
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
