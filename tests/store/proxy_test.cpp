#include "store/proxy_fixture.h"

namespace muster {
namespace {

TEST(Proxy, RefusesADuplicateRequestNumber) {
  for (const bool merge : {false, true}) {
    ProxyFixture node(Proxy::Options{.merge = merge});
    for (const char* key : {"a", "b"}) node.ask(1, 7, StoreOperation::kQueuePop, {key});
    node.ask(2, 7, StoreOperation::kQueuePop, {"c"});
    node.settle();
    EXPECT_EQ(node.replies(), Texts{"1:7=protocol error"});
    for (const char* key : {"a", "b", "c"}) node.elsewhere(StoreOperation::kQueuePush, {key}, {to_bytes(key)});
    EXPECT_EQ(node.replies(), (Texts{"1:7=a;", "2:7=c;"}));
    EXPECT_EQ(node.proxy.pending(), 0U);
  }
}

// PyTorch's client does not wait for its sets, so it may be gone when a set arrives.
TEST(Proxy, CancelsARemovedClientsRequestsThatNeedReplies) {
  for (const bool merge : {false, true}) {
    ProxyFixture node(Proxy::Options{.merge = merge});
    node.ask(1, 1, StoreOperation::kSet, {"k"}, 0, {to_bytes("x")});
    node.ask(1, 2, StoreOperation::kCompareSet, {"other"}, 0, {{}, to_bytes("y")});
    EXPECT_EQ(node.up().size(), 2U);
    node.proxy.drop(1);
    const std::vector<Request> requests = node.up();
    ASSERT_EQ(requests.size(), 1U);
    EXPECT_EQ(requests[0].operation, StoreOperation::kCancel);
    EXPECT_EQ(requests[0].id, node.in_flight[1].id);
    node.settle();
    EXPECT_EQ(node.replies(), Texts{});
    EXPECT_EQ(node.proxy.pending(), 0U);
  }
}

// ---- adds

TEST(Proxy, MergesAddsAndSplitsTheSum) {
  ProxyFixture node;
  node.elsewhere(StoreOperation::kAdd, {"n"}, {}, 100);
  for (ClientId client = 1; client <= 3; ++client)
    node.ask(client, 7, StoreOperation::kAdd, {"n"}, 10 * int64_t(client));
  const auto requests = node.up();
  ASSERT_EQ(requests.size(), 1U);
  EXPECT_EQ(requests[0].number, 60);
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:7=110", "2:7=130", "3:7=160"}));
  EXPECT_EQ(node.proxy.pending(), 0U);
}

TEST(Proxy, MergesAddsWhileOneIsOnItsWay) {
  ProxyFixture node;
  node.ask(1, 1, StoreOperation::kAdd, {"n"}, 1);
  EXPECT_EQ(node.up().size(), 1U);
  node.ask(2, 1, StoreOperation::kAdd, {"n"}, 2);
  node.ask(3, 1, StoreOperation::kAdd, {"n"}, 3);
  node.ask(3, 2, StoreOperation::kAdd, {"other"}, 3);
  EXPECT_EQ(node.up().size(), 1U) << "the other key alone";
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:1=1", "3:2=3", "2:1=3", "3:1=6"}));
}

TEST(Proxy, RefusesExactlyTheAddThatOverflows) {
  ProxyFixture node;
  node.elsewhere(StoreOperation::kAdd, {"n"}, {}, INT64_MAX - 5);
  node.ask(1, 1, StoreOperation::kAdd, {"n"}, 3);
  node.ask(2, 1, StoreOperation::kAdd, {"n"}, 4);
  node.ask(3, 1, StoreOperation::kAdd, {"n"}, 2);
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:1=" + std::to_string(INT64_MAX - 2), "2:1=invalid argument",
                                   "3:1=" + std::to_string(INT64_MAX)}));
}

TEST(Proxy, NeverMergesAmountsOfDifferentSigns) {
  ProxyFixture node;
  node.elsewhere(StoreOperation::kAdd, {"n"}, {}, INT64_MAX);
  node.ask(1, 1, StoreOperation::kAdd, {"n"}, 5);
  node.ask(2, 1, StoreOperation::kAdd, {"n"}, -5);
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:1=invalid argument", "2:1=" + std::to_string(INT64_MAX - 5)}));
}

// ---- barriers

TEST(Proxy, MergesArrivalsIntoOneWithASummedWeight) {
  ProxyFixture node;
  for (ClientId client = 1; client <= 3; ++client) node.ask(client, 1, StoreOperation::kBarrier, {"b"}, 4);
  EXPECT_TRUE(node.up().empty()) << "others may come";
  ASSERT_TRUE(node.proxy.next_wake().has_value());
  node.now = *node.proxy.next_wake();
  const auto requests = node.up();
  ASSERT_EQ(requests.size(), 1U);
  EXPECT_EQ(requests[0].weight, 3U);
  node.settle();
  EXPECT_EQ(node.replies(), Texts{});
  node.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 4);
  EXPECT_EQ(node.replies(), (Texts{"1:1=1", "2:1=1", "3:1=1"}));
  for (ClientId client = 1; client <= 3; ++client) node.ask(client, 2, StoreOperation::kBarrier, {"c"}, 3);
  EXPECT_EQ(node.up().size(), 1U) << "as many as last time: it waits for no other caller";
}

TEST(Proxy, StopsHoldingArrivalsOfALoneClient) {
  ProxyFixture node;
  for (RequestId round = 1; round <= 10; ++round) {
    node.ask(1, round, StoreOperation::kBarrier, {"b"}, 2);
    if (const auto wake = node.proxy.next_wake()) node.now = std::max(node.now, *wake);
    node.settle();
    node.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 2);
    EXPECT_EQ(node.replies().size(), 1U);
  }
  node.ask(1, 11, StoreOperation::kBarrier, {"b"}, 2);
  EXPECT_EQ(node.up().size(), 1U);
}

TEST(Proxy, ReleasesPartOfAMergedArrival) {
  ProxyFixture node;
  node.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 3);
  for (ClientId client = 1; client <= 3; ++client) node.ask(client, 1, StoreOperation::kBarrier, {"b"}, 3);
  node.now = *node.proxy.next_wake();
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"1:1=1", "2:1=1"}));
  EXPECT_EQ(node.root.waiters(), 1U) << "the third begins the next round";
  node.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 3);
  node.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 3);
  EXPECT_EQ(node.replies(), Texts{"3:1=1"});
}

TEST(Proxy, WithdrawsExactlyTheCancelledArrival) {
  ProxyFixture node;
  for (ClientId client = 1; client <= 3; ++client) node.ask(client, 1, StoreOperation::kBarrier, {"b"}, 3 + 1);
  node.ask(2, 1, StoreOperation::kCancel, {});
  EXPECT_EQ(node.replies(), Texts{"2:1=aborted"}) << "it had not left yet";
  node.now = *node.proxy.next_wake();
  node.settle();
  node.ask(1, 1, StoreOperation::kCancel, {});
  node.settle();
  EXPECT_EQ(node.replies(), Texts{"1:1=aborted"});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(node.replies(), Texts{});
    node.elsewhere(StoreOperation::kBarrier, {"b"}, {}, 4);
  }
  EXPECT_EQ(node.replies(), Texts{"3:1=1"});
  EXPECT_EQ(node.proxy.pending(), 0U);
}

TEST(Proxy, ReleasesABarrierThatCrossesACancellation) {
  ProxyFixture node;
  for (ClientId client = 1; client <= 2; ++client) node.ask(client, 1, StoreOperation::kBarrier, {"b"}, 3);
  node.now = *node.proxy.next_wake();
  node.settle();
  Replies released = node.root.apply({StoreOperation::kBarrier, 1, {"b"}, {}, 3}, kOtherClient);
  node.ask(1, 1, StoreOperation::kCancel, {});
  EXPECT_EQ(node.up().size(), 1U);
  node.down(std::move(released));
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"2:1=1", "1:1=1"}));
  EXPECT_EQ(node.proxy.pending(), 0U);
}

TEST(Proxy, WithdrawsTheArrivalsOfARemovedClient) {
  ProxyFixture node;
  node.ask(1, 1, StoreOperation::kBarrier, {"b"}, 2);
  node.now = *node.proxy.next_wake();
  node.settle();
  EXPECT_EQ(node.root.waiters(), 1U);
  node.proxy.drop(1);
  node.settle();
  EXPECT_EQ(node.root.waiters(), 0U);
  EXPECT_EQ(node.proxy.pending(), 0U);
}

TEST(Proxy, AcceptsWithdrawalsWhenFull) {
  ProxyFixture node;
  node.ask(1, 1, StoreOperation::kBarrier, {"b"}, 2);
  for (RequestId id = 1; node.proxy.pending() < (1 << 18); ++id) node.get(2, id, "never");
  node.now = *node.proxy.next_wake();
  node.settle();
  node.ask(3, 1, StoreOperation::kBarrier, {"b"}, 2);
  EXPECT_EQ(node.replies(), Texts{"3:1=resource exhausted"});
  node.ask(1, 2, StoreOperation::kWithdraw, {"b"}, 1);
  node.settle();
  EXPECT_EQ(node.replies(), Texts{"1:2=1"});
}

TEST(Proxy, ARefusedWithdrawalReleasesNothing) {
  ProxyFixture node;
  node.ask(1, 1, StoreOperation::kBarrier, {"b"}, 2);
  node.now = *node.proxy.next_wake();
  node.settle();
  node.ask(1, 1, StoreOperation::kCancel, {});
  const auto requests = node.up();
  ASSERT_EQ(requests.size(), 1U);
  node.down({{kProxy, requests[0].id, fail(ErrorCode::kPeerLost, "gone")}});
  EXPECT_EQ(node.replies(), Texts{"1:1=aborted"});
}

TEST(Proxy, ReportsDifferentBarrierCounts) {
  ProxyFixture node;
  node.ask(1, 1, StoreOperation::kBarrier, {"b"}, 2);
  node.ask(2, 1, StoreOperation::kBarrier, {"b"}, 3);
  node.ask(3, 1, StoreOperation::kBarrier, {"b"}, 3);
  node.now = *node.proxy.next_wake();
  node.settle();
  EXPECT_EQ(node.replies(), (Texts{"2:1=mismatch", "3:1=mismatch"}));
  EXPECT_EQ(node.root.waiters(), 1U);
}

// ---- all of them

TEST(Proxy, ForwardsEachRequestByItselfWithoutMerging) {
  ProxyFixture node{Proxy::Options{}};
  node.set("k", "x");
  for (ClientId client = 1; client <= 3; ++client) {
    node.get(client, 1, "k");
    node.ask(client, 2, StoreOperation::kAdd, {"n"}, 1);
    node.ask(client, 3, StoreOperation::kBarrier, {"b"}, 3);
  }
  EXPECT_EQ(node.up().size(), 9U);
  node.settle();
  EXPECT_EQ(node.replies().size(), 9U);
}

TEST(Proxy, FailsAllRequestsWhenTheServerIsLost) {
  ProxyFixture node;
  node.get(1, 1, "k");
  node.ask(2, 1, StoreOperation::kBarrier, {"b"}, 2);
  node.ask(3, 1, StoreOperation::kAdd, {"n"}, 2);
  node.ask(4, 1, StoreOperation::kSet, {"s"}, 0, {{1}});
  node.up();
  node.proxy.fail({ErrorCode::kPeerLost, "gone", kNoRank, {}});
  EXPECT_EQ(node.replies().size(), 4U);
  EXPECT_EQ(node.proxy.pending(), 0U);
}

// ---- proxies below proxies

TEST(Proxy, PassesLeasesOnAndRecallsThemFirst) {
  ProxyFixture node;
  node.set("k", "old");
  Request request{StoreOperation::kGet, 1, {"k"}};
  request.lease = true;
  node.proxy.submit(request, 1, node.now);
  node.settle();
  Replies replies = node.proxy.take_replies();
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_TRUE(replies[0].leased);
  node.elsewhere(StoreOperation::kSet, {"k"}, {to_bytes("new")});
  EXPECT_TRUE(node.up().empty()) << "the proxy below has it";
  replies = node.proxy.take_replies();
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_TRUE(replies[0].recall);
  node.proxy.submit({StoreOperation::kRelease, 0, {"k"}}, 1, node.now);
  node.settle();
  EXPECT_EQ(node.root.apply({StoreOperation::kGet, 1, {"k"}}, kOtherClient)[0].values[0], to_bytes("new"));
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
