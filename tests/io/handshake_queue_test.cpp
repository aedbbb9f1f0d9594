#include "muster/io/connect/handshake_queue.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

constexpr TimePoint kStart{0};

std::string network(const char* address) { return network_of(*Address::parse(address)); }

std::optional<int> next(const HandshakeQueue& queue) {
  const auto candidate = queue.next();
  return candidate ? std::optional(candidate->id) : std::nullopt;
}

TEST(HandshakeQueue, HasNoCandidateWhileEmpty) {
  HandshakeQueue queue(4);
  EXPECT_FALSE(queue.next());
  queue.add(1, "a", kStart);
  queue.remove(1);
  EXPECT_FALSE(queue.next());
}

TEST(HandshakeQueue, NamesTheOldestSilentConnectionAfterItsGrace) {
  HandshakeQueue queue(4);
  queue.add(1, "a", kStart);
  queue.add(2, "a", kStart + 1ms);
  queue.on_bytes(1, kStart + 2ms);
  EXPECT_EQ(next(queue), 2);
  EXPECT_EQ(queue.next()->due, kStart + 1ms + HandshakeQueue::kSilentGrace);
  queue.remove(2);
  EXPECT_EQ(next(queue), 1);
  EXPECT_EQ(queue.next()->due, kStart + 2ms + HandshakeQueue::kStepGrace);
}

TEST(HandshakeQueue, LimitsTheGraceOfAllSteps) {
  HandshakeQueue queue(4);
  queue.add(1, "a", kStart);
  TimePoint now = kStart;
  for (int step = 0; step < 2 * HandshakeQueue::kMaxSteps; ++step) queue.on_bytes(1, now = now + 1ms);
  EXPECT_EQ(queue.next()->due, kStart + HandshakeQueue::kMaxSteps * Duration(1ms) + HandshakeQueue::kStepGrace);
}

TEST(HandshakeQueue, EvictsFromTheNetworkWithTheMostConnections) {
  HandshakeQueue queue(16);
  queue.add(1, "authenticated", kStart);
  for (int id = 2; id < 10; ++id) queue.add(id, "flood", kStart + 1ms);
  for (int id = 2; id < 9; ++id) {
    EXPECT_EQ(next(queue), id);
    queue.remove(id);
  }
  EXPECT_EQ(next(queue), 1) << "of two that have as many, the older connection";
}

TEST(HandshakeQueue, ReservesHalfForAuthenticatedNetworks) {
  HandshakeQueue queue(8);
  queue.add(1, "authenticated", kStart);
  queue.on_authenticated(1);
  for (int id = 1; id <= 4; ++id) queue.add(id, "authenticated", kStart);
  queue.add(5, "unauthenticated", kStart + 1ms);
  EXPECT_EQ(next(queue), 5);
  for (int id = 6; id <= 7; ++id) queue.add(id, "authenticated", kStart + 2ms);
  EXPECT_EQ(next(queue), 1);
}

TEST(HandshakeQueue, GroupsIpv6AddressesByNetwork) {
  EXPECT_NE(network("10.0.0.1:1"), network("10.0.0.2:1"));
  EXPECT_EQ(network("10.0.0.1:1"), network("10.0.0.1:2"));
  EXPECT_EQ(network("10.0.0.1:1"), network("[::ffff:10.0.0.1]:1"));
  EXPECT_EQ(network("[2001:db8::1]:1"), network("[2001:db8::ffff:2]:1"));
  EXPECT_NE(network("[2001:db8::1]:1"), network("[2001:db8:0:1::1]:1"));
  EXPECT_NE(network("[fe80::1]:1"), network("[fe80::2]:1"));
}

}  // namespace
}  // namespace muster
