#include "muster/rpc/peer_calls.h"

#include <gtest/gtest.h>

namespace muster::rpc {
namespace {

CallPtr call_of(size_t bytes = 1) {
  auto call = std::make_shared<OutgoingCall>(nullptr);
  call->arguments.head.resize(bytes);
  return call;
}

TEST(PeerCalls, NumbersCallsFromOneInOrder) {
  PeerCalls calls(10, {10, 1000});
  const CallPtr first = call_of(), second = call_of();
  EXPECT_TRUE(calls.add(first));
  EXPECT_TRUE(calls.add(second));
  EXPECT_EQ(calls.next(), first);
  EXPECT_EQ(calls.next(), second);
  EXPECT_EQ(calls.next(), nullptr);
  EXPECT_EQ(first->id, 1);
  EXPECT_EQ(second->id, 2);
}

TEST(PeerCalls, RefusesMoreWaitingCallsThanTheCap) {
  PeerCalls calls(2, {1, 1000});
  EXPECT_TRUE(calls.add(call_of()));
  EXPECT_TRUE(calls.add(call_of()));
  EXPECT_FALSE(calls.add(call_of()));
  EXPECT_NE(calls.next(), nullptr);
  EXPECT_TRUE(calls.add(call_of()));
}

TEST(PeerCalls, KeepsTheWindowByCountAndByBytes) {
  PeerCalls calls(10, {3, 100});
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(calls.add(call_of(40)));
  EXPECT_NE(calls.next(), nullptr);
  EXPECT_NE(calls.next(), nullptr);
  EXPECT_EQ(calls.next(), nullptr) << "120 bytes are over 100";
  ASSERT_TRUE(calls.on_answer(1));
  EXPECT_NE(calls.next(), nullptr);
  EXPECT_EQ(calls.in_flight(), 2);
}

TEST(PeerCalls, SendsALargeCallIfHalfOfTheWindowIsFree) {
  PeerCalls calls(10, {5, 100});
  for (const size_t bytes : {1, 1000, 1}) EXPECT_TRUE(calls.add(call_of(bytes)));
  EXPECT_NE(calls.next(), nullptr);
  EXPECT_NE(calls.next(), nullptr) << "it is larger than the window";
  EXPECT_EQ(calls.next(), nullptr);
  ASSERT_TRUE(calls.on_answer(2));
  EXPECT_NE(calls.next(), nullptr);
}

TEST(PeerCalls, AStartedCallNeedsNoRoomInTheWindow) {
  PeerCalls calls(100, {2, 1000});
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(calls.add(call_of()));
  uint64_t sent = 0;
  while (calls.next()) {
    EXPECT_EQ(calls.on_answer(++sent, /*started=*/true).value(), nullptr) << "the call goes on";
  }
  EXPECT_EQ(sent, 2 * CallWindow::kMaxStarted);
  EXPECT_FALSE(calls.on_answer(1, /*started=*/true)) << "for a second time";
  EXPECT_NE(calls.on_answer(1).value(), nullptr);
  EXPECT_NE(calls.next(), nullptr);
  EXPECT_EQ(calls.next(), nullptr);
  EXPECT_EQ(calls.on_lost().size(), 2 * CallWindow::kMaxStarted);
  EXPECT_NE(calls.next(), nullptr);
}

TEST(PeerCalls, AnAbandonedCallKeepsItsRoomUntilItsAnswer) {
  PeerCalls calls(10, {1, 100});
  const CallPtr first = call_of();
  EXPECT_TRUE(calls.add(first));
  EXPECT_TRUE(calls.add(call_of()));
  EXPECT_EQ(calls.next(), first);
  calls.abandon(*first);
  EXPECT_EQ(calls.next(), nullptr);
  const auto answered = calls.on_answer(1);
  ASSERT_TRUE(answered);
  EXPECT_EQ(*answered, nullptr);
  EXPECT_NE(calls.next(), nullptr);
}

TEST(PeerCalls, AnAbandonedCallThatWaitsIsNotSent) {
  PeerCalls calls(10, {10, 100});
  const CallPtr first = call_of(), second = call_of();
  EXPECT_TRUE(calls.add(first));
  EXPECT_TRUE(calls.add(second));
  calls.abandon(*first);
  EXPECT_EQ(calls.next(), second);
  EXPECT_EQ(second->id, 1);
}

TEST(PeerCalls, RefusesAnswersToOtherRequests) {
  PeerCalls calls(10, {10, 100});
  EXPECT_TRUE(calls.add(call_of()));
  ASSERT_NE(calls.next(), nullptr);
  EXPECT_FALSE(calls.on_answer(2));
  ASSERT_TRUE(calls.on_answer(1));
  const auto again = calls.on_answer(1);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, ErrorCode::kProtocol);
}

TEST(PeerCalls, OnlyOneWayCallsEndWhenTheyStart) {
  PeerCalls calls(10, {10, 100});
  const CallPtr normal = call_of(), one_way = call_of();
  one_way->options.one_way = true;
  EXPECT_TRUE(calls.add(normal));
  EXPECT_TRUE(calls.add(one_way));
  ASSERT_EQ(calls.next(), normal);
  ASSERT_EQ(calls.next(), one_way);
  EXPECT_EQ(calls.on_answer(1, true).value(), nullptr);
  EXPECT_EQ(*calls.on_answer(2, true), one_way);
}

TEST(PeerCalls, EmptySegmentsCountInTheWindow) {
  PeerCalls calls(10, {10, 10 * kSegmentOverhead});
  for (int i = 0; i < 2; ++i) {
    const CallPtr call = call_of(0);
    call->arguments.segments.resize(6);
    EXPECT_TRUE(calls.add(call));
  }
  EXPECT_NE(calls.next(), nullptr);
  EXPECT_EQ(calls.next(), nullptr);
}

TEST(PeerCalls, ALostConnectionReturnsTheCallsInFlight) {
  PeerCalls calls(10, {2, 100});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(calls.add(call_of()));
  const CallPtr first = calls.next(), second = calls.next();
  calls.abandon(*second);
  const auto lost = calls.on_lost();
  ASSERT_EQ(lost.size(), 1);
  EXPECT_EQ(lost[0], first);
  EXPECT_EQ(calls.in_flight(), 0);
  EXPECT_EQ(calls.take_waiting().size(), 1);
  EXPECT_FALSE(calls.has_waiting());
}

}  // namespace
}  // namespace muster::rpc
