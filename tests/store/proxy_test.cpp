#include "store/proxy_fixture.h"

namespace muster {
namespace {

TEST(Proxy, RefusesARequestNumberThatIsWaitingAlready) {
  for (const bool merge : {false, true}) {
    World world(Proxy::Options{.merge = merge});
    for (const char* key : {"a", "b"}) world.ask(1, 7, StoreOperation::kQueuePop, {key});
    world.ask(2, 7, StoreOperation::kQueuePop, {"c"});
    world.settle();
    EXPECT_EQ(world.heard(), Heard{"1:7=protocol error"});
    for (const char* key : {"a", "b", "c"}) world.elsewhere(StoreOperation::kQueuePush, {key}, {to_bytes(key)});
    EXPECT_EQ(world.heard(), (Heard{"1:7=a;", "2:7=c;"}));
    EXPECT_EQ(world.proxy.pending(), 0U);
  }
}

// PyTorch's client does not wait for its sets, and may be gone when one arrives.
TEST(Proxy, CancelsForAClientThatLeavesOnlyWhatWouldBeAnswered) {
  for (const bool merge : {false, true}) {
    World world(Proxy::Options{.merge = merge});
    world.ask(1, 1, StoreOperation::kSet, {"k"}, 0, {to_bytes("x")});
    world.ask(1, 2, StoreOperation::kCompareSet, {"other"}, 0, {{}, to_bytes("y")});
    EXPECT_EQ(world.up().size(), 2U);
    world.proxy.drop(1, world.now);
    const std::vector<Request> requests = world.up();
    ASSERT_EQ(requests.size(), 1U);
    EXPECT_EQ(requests[0].operation, StoreOperation::kCancel);
    EXPECT_EQ(requests[0].id, world.travelling[1].id);
    world.settle();
    EXPECT_EQ(world.heard(), Heard{});
    EXPECT_EQ(world.proxy.pending(), 0U);
  }
}

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

TEST(Proxy, TakesBackArrivalsHoweverMuchWaits) {
  World world;
  world.ask(1, 1, StoreOperation::kBarrier, {"b"}, 2);
  for (RequestId id = 1; world.proxy.pending() < (1 << 18); ++id) world.get(2, id, "never");
  world.now = *world.proxy.next_wake();
  world.settle();
  world.ask(3, 1, StoreOperation::kBarrier, {"b"}, 2);
  EXPECT_EQ(world.heard(), Heard{"3:1=resource exhausted"});
  world.ask(1, 2, StoreOperation::kWithdraw, {"b"}, 1);
  world.settle();
  EXPECT_EQ(world.heard(), Heard{"1:2=1"});
}

TEST(Proxy, TakesARefusedWithdrawalForNoRelease) {
  World world;
  world.ask(1, 1, StoreOperation::kBarrier, {"b"}, 2);
  world.now = *world.proxy.next_wake();
  world.settle();
  world.ask(1, 1, StoreOperation::kCancel, {});
  const auto requests = world.up();
  ASSERT_EQ(requests.size(), 1U);
  world.down({{kProxy, requests[0].id, fail(ErrorCode::kPeerLost, "gone")}});
  EXPECT_EQ(world.heard(), Heard{"1:1=aborted"});
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

// ---- all of them

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
