#include "muster/store/proxy.h"

#include <gtest/gtest.h>

#include "muster/store/lease.h"
#include "store/expect.h"

namespace muster {
namespace {

constexpr ClientId kProxy = 100, kStranger = 200;

// A proxy before a store, with nothing but function calls between them.
class World {
 public:
  explicit World(Proxy::Options options = merging()) : proxy(options) { lease(kLeaseTime); }
  static Proxy::Options merging() {
    Proxy::Options options;
    options.merge = true;
    return options;
  }

  void lease(Duration time) { proxy.set_lease_end(now + time, now); }
  void ask(ClientId client, RequestId id, StoreOperation operation, std::vector<Key> keys, int64_t number = 0,
           std::vector<Bytes> values = {}) {
    proxy.submit({operation, id, std::move(keys), std::move(values), number}, client, now);
  }
  void get(ClientId client, RequestId id, Key key) { ask(client, id, StoreOperation::kGet, {std::move(key)}); }
  /// Takes what goes up now, and leaves it on its way.
  std::vector<Request> up() {
    std::vector<Request> requests = proxy.take_requests(now);
    travelling.insert(travelling.end(), requests.begin(), requests.end());
    return requests;
  }
  /// What is on its way arrives, and the replies come back; until all is quiet.
  void settle() {
    for (up(); !travelling.empty(); up()) {
      for (Request& request : std::exchange(travelling, {})) down(root.apply(std::move(request), kProxy));
    }
  }
  void down(Replies replies) {
    for (Reply& reply : replies) {
      if (reply.client == kProxy) proxy.receive(std::move(reply), now);
    }
  }
  /// A request of another node. What it releases here arrives.
  Replies elsewhere(StoreOperation operation, std::vector<Key> keys, std::vector<Bytes> values = {},
                    int64_t number = 0) {
    Replies replies = root.apply({operation, ++last_id, std::move(keys), std::move(values), number}, kStranger);
    down(replies);
    return replies;
  }
  void set(const Key& key, const std::string& value) { elsewhere(StoreOperation::kSet, {key}, {to_bytes(value)}); }

  /// "client:id=number or text or error", in order.
  std::vector<std::string> heard() {
    std::vector<std::string> result;
    for (const Reply& reply : proxy.take_replies()) {
      std::string text = std::to_string(reply.client) + ":" + std::to_string(reply.id) + "=";
      if (!reply.status) text += name(reply.status.error().code);
      if (reply.status && reply.values.empty()) text += std::to_string(reply.number);
      for (const Bytes& value : reply.values) text += to_string(value) + ";";
      result.push_back(text);
    }
    return result;
  }

  TimePoint now{1'000'000'000};
  Proxy proxy;
  StoreState root;
  std::vector<Request> travelling;
  RequestId last_id = 0;
};
using Heard = std::vector<std::string>;

// ---- adds

TEST(Proxy, SendsAddsThatMeetAsOneAndSplitsTheSum) {
  World world;
  world.elsewhere(StoreOperation::kAdd, {"n"}, {}, 100);
  for (ClientId client = 1; client <= 3; ++client)
    world.ask(client, 7, StoreOperation::kAdd, {"n"}, 10 * int64_t(client));
  const auto requests = world.up();
  ASSERT_EQ(requests.size(), 1U);
  EXPECT_EQ(requests[0].number, 60);
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:7=110", "2:7=130", "3:7=160"}));
  EXPECT_EQ(world.proxy.pending(), 0U);
}

TEST(Proxy, GathersAddsWhileOneIsOnItsWay) {
  World world;
  world.ask(1, 1, StoreOperation::kAdd, {"n"}, 1);
  EXPECT_EQ(world.up().size(), 1U);
  world.ask(2, 1, StoreOperation::kAdd, {"n"}, 2);
  world.ask(3, 1, StoreOperation::kAdd, {"n"}, 3);
  world.ask(3, 2, StoreOperation::kAdd, {"other"}, 3);
  EXPECT_EQ(world.up().size(), 1U) << "the other key alone";
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:1=1", "3:2=3", "2:1=3", "3:1=6"}));
}

TEST(Proxy, RefusesExactlyTheAddThatOverflows) {
  World world;
  world.elsewhere(StoreOperation::kAdd, {"n"}, {}, INT64_MAX - 5);
  world.ask(1, 1, StoreOperation::kAdd, {"n"}, 3);
  world.ask(2, 1, StoreOperation::kAdd, {"n"}, 4);
  world.ask(3, 1, StoreOperation::kAdd, {"n"}, 2);
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:1=" + std::to_string(INT64_MAX - 2), "2:1=invalid argument",
                                  "3:1=" + std::to_string(INT64_MAX)}));
}

TEST(Proxy, NeverMergesAmountsOfDifferentSigns) {
  World world;
  world.elsewhere(StoreOperation::kAdd, {"n"}, {}, INT64_MAX);
  world.ask(1, 1, StoreOperation::kAdd, {"n"}, 5);
  world.ask(2, 1, StoreOperation::kAdd, {"n"}, -5);
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:1=invalid argument", "2:1=" + std::to_string(INT64_MAX - 5)}));
}

// ---- barriers

TEST(Proxy, GathersArrivalsIntoOneOfTheirWeight) {
  World world;
  for (ClientId client = 1; client <= 3; ++client) world.ask(client, 1, StoreOperation::kBarrier, {"b"}, 4);
  EXPECT_TRUE(world.up().empty()) << "others may come";
  ASSERT_TRUE(world.proxy.next_wake().has_value());
  world.now = *world.proxy.next_wake();
  const auto requests = world.up();
  ASSERT_EQ(requests.size(), 1U);
  EXPECT_EQ(requests[0].weight, 3U);
  world.settle();
  EXPECT_EQ(world.heard(), Heard{});
  world.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 4);
  EXPECT_EQ(world.heard(), (Heard{"1:1=1", "2:1=1", "3:1=1"}));
  for (ClientId client = 1; client <= 3; ++client) world.ask(client, 2, StoreOperation::kBarrier, {"c"}, 3);
  EXPECT_EQ(world.up().size(), 1U) << "as many as last time are here: nobody else is waited for";
}

TEST(Proxy, StopsHoldingWhereNobodyElseComes) {
  World world;
  for (RequestId round = 1; round <= 10; ++round) {
    world.ask(1, round, StoreOperation::kBarrier, {"b"}, 2);
    if (const auto wake = world.proxy.next_wake()) world.now = std::max(world.now, *wake);
    world.settle();
    world.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 2);
    EXPECT_EQ(world.heard().size(), 1U);
  }
  world.ask(1, 11, StoreOperation::kBarrier, {"b"}, 2);
  EXPECT_EQ(world.up().size(), 1U);
}

TEST(Proxy, ReleasesPartOfAMergedArrivalWhereTheRoundTakesNoMore) {
  World world;
  world.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 3);
  for (ClientId client = 1; client <= 3; ++client) world.ask(client, 1, StoreOperation::kBarrier, {"b"}, 3);
  world.now = *world.proxy.next_wake();
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"1:1=1", "2:1=1"}));
  EXPECT_EQ(world.root.waiters(), 1U) << "the third begins the next round";
  world.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 3);
  world.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 3);
  EXPECT_EQ(world.heard(), Heard{"3:1=1"});
}

TEST(Proxy, TakesBackExactlyTheArrivalThatIsCancelled) {
  World world;
  for (ClientId client = 1; client <= 3; ++client) world.ask(client, 1, StoreOperation::kBarrier, {"b"}, 3 + 1);
  world.ask(2, 1, StoreOperation::kCancel, {});
  EXPECT_EQ(world.heard(), Heard{"2:1=aborted"}) << "it had not left yet";
  world.now = *world.proxy.next_wake();
  world.settle();
  world.ask(1, 1, StoreOperation::kCancel, {});
  world.settle();
  EXPECT_EQ(world.heard(), Heard{"1:1=aborted"});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(world.heard(), Heard{});
    world.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 4);
  }
  EXPECT_EQ(world.heard(), Heard{"3:1=1"});
  EXPECT_EQ(world.proxy.pending(), 0U);
}

TEST(Proxy, LetsTheReleaseWinThatCrossesACancellation) {
  World world;
  for (ClientId client = 1; client <= 2; ++client) world.ask(client, 1, StoreOperation::kBarrier, {"b"}, 3);
  world.now = *world.proxy.next_wake();
  world.settle();
  Replies released = world.root.apply({StoreOperation::kBarrier, 1, {"b"}, {}, 3}, kStranger);
  world.ask(1, 1, StoreOperation::kCancel, {});
  EXPECT_EQ(world.up().size(), 1U);
  world.down(std::move(released));
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"2:1=1", "1:1=1"}));
  EXPECT_EQ(world.proxy.pending(), 0U);
}

TEST(Proxy, WithdrawsTheArrivalsOfAClientThatIsGone) {
  World world;
  world.ask(1, 1, StoreOperation::kBarrier, {"b"}, 2);
  world.now = *world.proxy.next_wake();
  world.settle();
  EXPECT_EQ(world.root.waiters(), 1U);
  world.proxy.drop(1, world.now);
  world.settle();
  EXPECT_EQ(world.root.waiters(), 0U);
  EXPECT_EQ(world.proxy.pending(), 0U);
}

TEST(Proxy, TellsThoseWhoDisagreeAboutABarrier) {
  World world;
  world.ask(1, 1, StoreOperation::kBarrier, {"b"}, 2);
  world.ask(2, 1, StoreOperation::kBarrier, {"b"}, 3);
  world.ask(3, 1, StoreOperation::kBarrier, {"b"}, 3);
  world.now = *world.proxy.next_wake();
  world.settle();
  EXPECT_EQ(world.heard(), (Heard{"2:1=mismatch", "3:1=mismatch"}));
  EXPECT_EQ(world.root.waiters(), 1U);
}

// ---- reads

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

TEST(Proxy, ForwardsEachRequestByItselfWithoutMerging) {
  World world{Proxy::Options{}};
  world.set("k", "x");
  for (ClientId client = 1; client <= 3; ++client) {
    world.get(client, 1, "k");
    world.ask(client, 2, StoreOperation::kAdd, {"n"}, 1);
    world.ask(client, 3, StoreOperation::kBarrier, {"b"}, 3);
  }
  EXPECT_EQ(world.up().size(), 9U);
  world.settle();
  EXPECT_EQ(world.heard().size(), 9U);
}

TEST(Proxy, AnswersEverybodyWhenTheServerIsLost) {
  World world;
  world.get(1, 1, "k");
  world.ask(2, 1, StoreOperation::kBarrier, {"b"}, 2);
  world.ask(3, 1, StoreOperation::kAdd, {"n"}, 2);
  world.ask(4, 1, StoreOperation::kSet, {"s"}, 0, {{1}});
  world.up();
  world.proxy.fail({ErrorCode::kPeerLost, "gone", kNoRank, {}});
  EXPECT_EQ(world.heard().size(), 4U);
  EXPECT_EQ(world.proxy.pending(), 0U);
}

// ---- proxies below proxies

TEST(Proxy, PassesLeasesOnAndTakesThemBackFirst) {
  World world;
  world.set("k", "old");
  Request request{StoreOperation::kGet, 1, {"k"}};
  request.lease = true;
  world.proxy.submit(request, 1, world.now);
  world.settle();
  Replies replies = world.proxy.take_replies();
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_TRUE(replies[0].leased);
  world.elsewhere(StoreOperation::kSet, {"k"}, {to_bytes("new")});
  EXPECT_TRUE(world.up().empty()) << "the proxy below has it";
  replies = world.proxy.take_replies();
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_TRUE(replies[0].recall);
  world.proxy.submit({StoreOperation::kRelease, 0, {"k"}}, 1, world.now);
  world.settle();
  EXPECT_EQ(world.root.apply({StoreOperation::kGet, 1, {"k"}}, kStranger)[0].values[0], to_bytes("new"));
}

TEST(ParentOf, MakesATreeOfBoundedDegree) {
  EXPECT_EQ(parent_of(0, 100, 4), -1);
  EXPECT_EQ(parent_of(5, 100, 0), 0);
  for (const int fanout : {1, 2, 8, 64}) {
    std::vector<int> children(1000, 0);
    for (int node = 1; node < 1000; ++node) {
      const int parent = parent_of(node, 1000, fanout);
      ASSERT_GE(parent, 0);
      ASSERT_LT(parent, node);
      EXPECT_LE(++children[size_t(parent)], fanout);
    }
  }
}

}  // namespace
}  // namespace muster
