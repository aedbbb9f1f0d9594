#include "muster/store/state/state.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

constexpr ClientId kAlice = 1, kBob = 2, kCarol = 3;

Request request(StoreOperation operation, RequestId id, std::vector<Key> keys = {}, std::vector<Bytes> values = {},
                int64_t number = 0) {
  return {operation, id, std::move(keys), std::move(values), number};
}

// "client:id" of each reply, in order.
std::vector<std::string> names(const Replies& replies) {
  std::vector<std::string> result;
  for (const Reply& reply : replies) result.push_back(std::to_string(reply.client) + ":" + std::to_string(reply.id));
  return result;
}
using Names = std::vector<std::string>;

TEST(StoreState, AnswersThenReleasesInTheOrderOfArrival) {
  StoreState state;
  EXPECT_TRUE(state.apply(request(StoreOperation::kGet, 7, {"k"}), kBob).empty());
  EXPECT_TRUE(state.apply(request(StoreOperation::kWait, 8, {"k"}), kAlice).empty());
  EXPECT_EQ(state.waiters(), 2U);
  EXPECT_EQ(names(state.apply(request(StoreOperation::kSet, 9, {"k"}, {{1}}), kCarol)), (Names{"3:9", "2:7", "1:8"}));
  EXPECT_EQ(state.waiters(), 0U);
}

TEST(StoreState, ShowsAllOfAMultiSetToReleasedWaiters) {
  StoreState state;
  state.apply(request(StoreOperation::kSet, 1, {"b"}, {{0}}), kBob);
  EXPECT_TRUE(state.apply(request(StoreOperation::kMultiGet, 1, {"a", "b"}), kAlice).empty());
  const Replies replies = state.apply(request(StoreOperation::kMultiSet, 2, {"a", "b"}, {{1}, {1}}), kBob);
  ASSERT_EQ(names(replies), (Names{"2:2", "1:1"}));
  EXPECT_EQ(replies[1].values, (std::vector<Bytes>{{1}, {1}}));
}

TEST(StoreState, ReleasesAWaitForManyKeysOnceAllExist) {
  StoreState state;
  EXPECT_TRUE(state.apply(request(StoreOperation::kWait, 1, {"a", "b", "a", "c"}), kAlice).empty());
  EXPECT_EQ(names(state.apply(request(StoreOperation::kSet, 1, {"c"}, {{}}), kBob)), Names{"2:1"});
  EXPECT_EQ(names(state.apply(request(StoreOperation::kSet, 2, {"a"}, {{}}), kBob)), Names{"2:2"});
  state.apply(request(StoreOperation::kDelete, 3, {"a"}), kBob);
  EXPECT_EQ(names(state.apply(request(StoreOperation::kSet, 4, {"b"}, {{}}), kBob)), Names{"2:4"}) << "a is gone again";
  EXPECT_EQ(names(state.apply(request(StoreOperation::kSet, 5, {"a"}, {{}}), kBob)), (Names{"2:5", "1:1"}));
}

TEST(StoreState, ForgetsTheWaitsOfADroppedClient) {
  StoreState state;
  state.apply(request(StoreOperation::kGet, 1, {"k"}), kAlice);
  state.apply(request(StoreOperation::kQueuePop, 2, {"q"}), kAlice);
  state.apply(request(StoreOperation::kBarrier, 3, {"b"}, {}, 2), kAlice);
  state.apply(request(StoreOperation::kGet, 1, {"k"}), kBob);
  state.drop(kAlice);
  EXPECT_EQ(state.waiters(), 1U);
  EXPECT_EQ(names(state.apply(request(StoreOperation::kSet, 9, {"k"}, {{1}}), kCarol)), (Names{"3:9", "2:1"}));
  EXPECT_EQ(names(state.apply(request(StoreOperation::kQueuePush, 10, {"q"}, {{1}}), kCarol)), Names{"3:10"});
  EXPECT_EQ(state.apply(request(StoreOperation::kQueueLength, 11, {"q"}), kCarol).at(0).number, 1);
  EXPECT_TRUE(state.apply(request(StoreOperation::kBarrier, 12, {"b"}, {}, 2), kCarol).empty());
}

TEST(StoreState, AnswersACancelledRequestWithAborted) {
  StoreState state;
  state.apply(request(StoreOperation::kGet, 5, {"k"}), kAlice);
  EXPECT_TRUE(state.apply(request(StoreOperation::kCancel, 5), kBob).empty()) << "another client's number 5";
  const Replies replies = state.apply(request(StoreOperation::kCancel, 5), kAlice);
  ASSERT_EQ(names(replies), Names{"1:5"});
  EXPECT_EQ(replies[0].status.error().code, ErrorCode::kAborted);
  EXPECT_TRUE(state.apply(request(StoreOperation::kCancel, 5), kAlice).empty()) << "answered already";
}

TEST(StoreState, PushReleasesOneWaiterPopsFirst) {
  StoreState state;
  state.apply(request(StoreOperation::kWait, 1, {"q"}), kAlice);
  state.apply(request(StoreOperation::kWait, 2, {"q"}), kBob);
  state.apply(request(StoreOperation::kGet, 3, {"q"}), kBob);
  state.apply(request(StoreOperation::kQueuePop, 4, {"q"}), kCarol);
  const Replies taken = state.apply(request(StoreOperation::kQueuePush, 1, {"q"}, {{42}}), 9);
  ASSERT_EQ(names(taken), (Names{"9:1", "3:4"}));
  EXPECT_EQ(taken[1].values, std::vector<Bytes>{{42}});
  EXPECT_EQ(names(state.apply(request(StoreOperation::kQueuePush, 2, {"q"}, {{1}}), 9)), (Names{"9:2", "1:1"}));
  EXPECT_EQ(names(state.apply(request(StoreOperation::kQueuePush, 3, {"q"}, {{2}}), 9)), (Names{"9:3", "2:2"}));
  EXPECT_EQ(state.waiters(), 1U) << "a get waits for a key, not for a queue";
}

TEST(StoreState, AKeyDoesNotReleaseAPop) {
  StoreState state;
  state.apply(request(StoreOperation::kQueuePop, 1, {"q"}), kAlice);
  EXPECT_EQ(names(state.apply(request(StoreOperation::kSet, 1, {"q"}, {{1}}), kBob)), Names{"2:1"});
  EXPECT_EQ(names(state.apply(request(StoreOperation::kQueuePush, 2, {"q"}, {{1}}), kBob)), (Names{"2:2", "1:1"}));
}

TEST(StoreState, AnswersImmediateRequestsAtOnce) {
  StoreState state;
  Request get = request(StoreOperation::kMultiGet, 1, {"a", "b"});
  get.immediate = true;
  state.apply(request(StoreOperation::kSet, 1, {"b"}, {{2}}), kBob);
  EXPECT_EQ(state.apply(get, kAlice).at(0).values, (std::vector<Bytes>{{}, {2}}));
  Request pop = request(StoreOperation::kQueuePop, 2, {"q"});
  pop.immediate = true;
  EXPECT_TRUE(state.apply(pop, kAlice).at(0).values.empty());
  state.apply(request(StoreOperation::kQueuePush, 3, {"q"}, {{7}}), kBob);
  state.apply(request(StoreOperation::kQueuePush, 4, {"q"}, {{8}}), kBob);
  const Replies popped = state.apply(pop, kAlice);
  EXPECT_EQ(popped.at(0).number, 2) << "the length before, as torch's protocol has it";
  EXPECT_EQ(popped.at(0).values, std::vector<Bytes>{{7}});
}

TEST(StoreState, ReportsDifferentBarrierCounts) {
  StoreState state;
  EXPECT_TRUE(state.apply(request(StoreOperation::kBarrier, 1, {"b"}, {}, 3), kAlice).empty());
  const Replies disagreement = state.apply(request(StoreOperation::kBarrier, 1, {"b"}, {}, 2), kBob);
  ASSERT_EQ(names(disagreement), Names{"2:1"});
  EXPECT_EQ(disagreement[0].status.error().code, ErrorCode::kMismatch);
  EXPECT_TRUE(state.apply(request(StoreOperation::kBarrier, 2, {"b"}, {}, 3), kBob).empty());
  EXPECT_EQ(names(state.apply(request(StoreOperation::kBarrier, 1, {"b"}, {}, 3), kCarol)),
            (Names{"1:1", "2:2", "3:1"}));
  EXPECT_TRUE(state.apply(request(StoreOperation::kBarrier, 3, {"b"}, {}, 2), kAlice).empty())
      << "a new round, a new count";
}

TEST(StoreState, RefusesADuplicateRequestNumber) {
  StoreState state;
  state.apply(request(StoreOperation::kGet, 1, {"a"}), kAlice);
  EXPECT_EQ(state.apply(request(StoreOperation::kGet, 1, {"b"}), kAlice).at(0).status.error().code,
            ErrorCode::kProtocol);
  EXPECT_EQ(state.waiters(), 1U);
}

TEST(StoreState, LimitsTheWaitsOfOneClient) {
  StoreState state;
  for (RequestId id = 0; id < kMaxWaitsPerClient; ++id) state.apply(request(StoreOperation::kGet, id, {"k"}), kAlice);
  const Replies replies = state.apply(request(StoreOperation::kGet, kMaxWaitsPerClient, {"k"}), kAlice);
  ASSERT_EQ(replies.size(), 1U);
  EXPECT_EQ(replies[0].status.error().code, ErrorCode::kResourceExhausted);
  EXPECT_TRUE(state.apply(request(StoreOperation::kGet, 1, {"k"}), kBob).empty());
  state.drop(kAlice);
  EXPECT_EQ(state.waiters(), 1U);
}

TEST(StoreState, RefusesWrongNumbersOfKeysAndValues) {
  StoreState state;
  for (const Request& wrong : {request(StoreOperation::kSet, 1, {"k"}), request(StoreOperation::kGet, 1),
                               request(StoreOperation::kMultiSet, 1, {"a", "b"}, {{1}}),
                               request(StoreOperation::kBarrier, 1, {"a", "b"}, {}, 1),
                               request(StoreOperation::kNumKeys, 1, {"a", "b"}), request(StoreOperation{}, 1, {"a"})}) {
    const Replies replies = state.apply(wrong, kAlice);
    ASSERT_EQ(replies.size(), 1U) << name(wrong.operation);
    EXPECT_FALSE(replies[0].status.has_value()) << name(wrong.operation);
  }
  EXPECT_EQ(state.waiters(), 0U);
}

// Carol holds a lease of the key. Changes of the key are deferred until Carol gives the lease back.
class DeferredChanges : public testing::TestWithParam<unsigned> {
 protected:
  DeferredChanges() {
    state.apply(request(StoreOperation::kSet, 1, {"k"}, {to_bytes("1")}), kCarol);
    Request get = request(StoreOperation::kGet, 2, {"k"});
    get.lease = true;
    EXPECT_TRUE(state.apply(get, kCarol)[0].leased);
  }
  Replies give_back() { return state.apply(request(StoreOperation::kRelease, 0, {"k"}), kCarol); }
  int64_t value() { return state.apply(request(StoreOperation::kAdd, 99, {"k"}, {}, 0), kCarol)[0].number; }

  StoreState state{GetParam()};
};

TEST_P(DeferredChanges, CanBeCancelled) {
  for (const RequestId id : {5, 6}) {
    for (const Reply& reply : state.apply(request(StoreOperation::kAdd, id, {"k"}, {}, 10), kAlice)) {
      EXPECT_TRUE(reply.recall);
    }
  }
  const Replies cancelled = state.apply(request(StoreOperation::kCancel, 5), kAlice);
  ASSERT_EQ(names(cancelled), Names{"1:5"});
  EXPECT_EQ(cancelled[0].status.error().code, ErrorCode::kAborted);
  EXPECT_TRUE(state.apply(request(StoreOperation::kCancel, 5), kAlice).empty());
  EXPECT_TRUE(state.apply(request(StoreOperation::kCancel, 6), kBob).empty()) << "it is Alice's";
  EXPECT_EQ(names(give_back()), Names{"1:6"});
  EXPECT_EQ(value(), 11);
}

TEST_P(DeferredChanges, AreDroppedWithTheirClientIfTheyNeedAReply) {
  state.apply(request(StoreOperation::kAdd, 5, {"k"}, {}, 10), kAlice);
  state.apply(request(StoreOperation::kAdd, 5, {"k"}, {}, 100), kBob);
  state.drop(kAlice);
  EXPECT_EQ(names(give_back()), Names{"2:5"});
  EXPECT_EQ(value(), 101);
}

TEST_P(DeferredChanges, SurviveTheirClientIfTheyNeedNoReply) {
  state.apply(request(StoreOperation::kSet, 5, {"k"}, {to_bytes("7")}), kAlice);
  state.drop(kAlice);
  give_back();
  EXPECT_EQ(value(), 7);
}

TEST_P(DeferredChanges, CountAsWaitsOfTheirClient) {
  for (RequestId id = 1; id <= kMaxWaitsPerClient; ++id) {
    for (const Reply& reply : state.apply(request(StoreOperation::kSet, id, {"k"}, {{1}}), kAlice)) {
      ASSERT_TRUE(reply.recall);
    }
  }
  Replies refused = state.apply(request(StoreOperation::kSet, 0, {"k"}, {{1}}), kAlice);
  ASSERT_EQ(names(refused), Names{"1:0"});
  EXPECT_EQ(refused[0].status.error().code, ErrorCode::kResourceExhausted);
  EXPECT_TRUE(state.apply(request(StoreOperation::kSet, 1, {"k"}, {{1}}), kBob).empty()) << "others may";
  EXPECT_EQ(give_back().size(), kMaxWaitsPerClient + 1);
  EXPECT_EQ(names(state.apply(request(StoreOperation::kSet, 0, {"k"}, {{1}}), kAlice)), Names{"1:0"});
}

TEST_P(DeferredChanges, NeedUniqueRequestNumbers) {
  EXPECT_EQ(state.apply(request(StoreOperation::kSet, 5, {"k"}, {{1}}), kAlice).size(), 1U) << "the recall";
  const Replies refused = state.apply(request(StoreOperation::kSet, 5, {"k"}, {{1}}), kAlice);
  ASSERT_EQ(names(refused), Names{"1:5"});
  EXPECT_EQ(refused[0].status.error().code, ErrorCode::kProtocol);
}

INSTANTIATE_TEST_SUITE_P(Shards, DeferredChanges, testing::Values(1U, 32U));

}  // namespace
}  // namespace muster
