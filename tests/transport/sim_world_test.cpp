#include "sim/sim_world.h"

#include <gtest/gtest.h>

#include <vector>

#include "contract/link_contract.h"

namespace muster::sim {
namespace {

struct Trace {
  std::vector<int64_t> times;
  uint64_t events = 0;
  friend bool operator==(const Trace&, const Trace&) = default;
};

/// Every rank passes tokens around a ring many times. `each` is called at every hop.
Trace run_ring(
    World& world, int ranks, int rounds, const std::function<void(int hop)>& each = [](int) {}) {
  std::vector<std::unique_ptr<Link>> out(ranks), in(ranks);
  std::vector<std::string> tokens(ranks, std::string(64, '\0'));
  for (int r = 0; r < ranks; ++r) std::tie(out[r], in[(r + 1) % ranks]) = world.connect(r, (r + 1) % ranks);
  Trace trace;
  int hops = 0;
  std::vector<std::function<void(Result<>)>> hop(ranks);
  for (int r = 0; r < ranks; ++r) {
    hop[r] = [&, r](Result<> result) {
      if (!result) return;
      trace.times.push_back(world.clock().now().ns);
      each(++hops);
      send_text(*out[r], tokens[r], [](Result<>) {});
      receive_text(*in[r], tokens[r], hop[r]);
    };
    receive_text(*in[r], tokens[r], hop[r]);
  }
  send_text(*out[0], tokens[0], [](Result<>) {});
  const int goal = ranks * rounds;
  (void)world.run_until([&] { return hops >= goal; }, Deadline::after(std::chrono::hours(1), world.clock()));
  trace.events = world.events();
  return trace;
}

TEST(SimWorld, RepeatsARunFromItsSeed) {
  const auto run = [](uint64_t seed) {
    World world(seed);
    return run_ring(world, 16, 50);
  };
  const Trace first = run(7);
  EXPECT_EQ(first.times.size(), 16u * 50);
  EXPECT_EQ(first, run(7));
  EXPECT_NE(first, run(8));
}

TEST(SimWorld, TakesTimeForBytesAndDistance) {
  Faults faults;
  faults.min_delay = faults.max_delay = std::chrono::milliseconds(1);
  faults.bytes_per_second = 1e6;
  World world(1, faults);
  auto [a, b] = world.connect(0, 1);
  const std::string text = pattern(100'000);
  std::string into(text.size(), '\0');
  Outcome sent, received;
  receive_text(*b, into, received.record());
  send_text(*a, text, sent.record());
  EXPECT_TRUE(sent.ok());
  ASSERT_TRUE(world.run_until([&] { return received.done(); }, Deadline::after(1s, world.clock())));
  EXPECT_EQ(world.clock().now().ns, 101'000'000);
  EXPECT_EQ(world.bytes_sent(0), 100'000u);
  EXPECT_EQ(world.bytes_sent(1), 0u);
}

TEST(SimWorld, DeliversDroppedPacketsLateAndInOrder) {
  const auto run = [](uint64_t seed) {
    Faults faults;
    faults.short_read = 0.5;
    faults.drop = 0.4;
    World world(seed, faults);
    auto [a, b] = world.connect(0, 1);
    const std::string text = pattern(5'000'000);
    std::string into(text.size(), '\0');
    Outcome sent, received;
    receive_text(*b, into, received.record());
    send_text(*a, text, sent.record());
    EXPECT_TRUE(world.run_until([&] { return received.done(); }, Deadline::after(60s, world.clock())));
    EXPECT_TRUE(sent.ok() && received.ok());
    EXPECT_TRUE(into == text);
    EXPECT_EQ(world.bytes_sent(0), text.size());
    EXPECT_GT(world.drops(), 5u);
    EXPECT_GE(world.clock().now().ns, 5'000'000);
    return std::pair(world.drops(), world.clock().now().ns);
  };
  EXPECT_EQ(run(3), run(3));
  EXPECT_NE(run(3), run(4));
}

TEST(SimWorld, WaitsOneRetransmissionForEveryDrop) {
  Faults faults;
  faults.min_delay = faults.max_delay = std::chrono::milliseconds(1);
  faults.bytes_per_second = 1e12;
  faults.drop = 0.9;
  World world(1, faults);
  auto [a, b] = world.connect(0, 1);
  std::string into(4, '\0');
  Outcome sent, received;
  receive_text(*b, into, received.record());
  send_text(*a, "abcd", sent.record());
  ASSERT_TRUE(world.run_until([&] { return received.done(); }, Deadline::after(60s, world.clock())));
  EXPECT_GT(world.drops(), 0u);
  EXPECT_EQ(world.clock().now().ns, 1'000'000 + 5'000'000 * static_cast<int64_t>(world.drops()));
}

TEST(SimWorld, KeepsAVirtualDeadline) {
  World world(1);
  const Result<> nothing = world.run_until([] { return false; }, Deadline::after(1s, world.clock()));
  EXPECT_EQ(nothing.error().code, ErrorCode::kTimeout);
  bool fired = false;
  world.at(TimePoint{5'000'000'000}, [&] { fired = true; });
  const Result<> early = world.run_until([&] { return fired; }, Deadline::after(1s, world.clock()));
  EXPECT_EQ(early.error().code, ErrorCode::kTimeout);
  EXPECT_EQ(world.clock().now().ns, 1'000'000'000);
  EXPECT_TRUE(world.run_until([&] { return fired; }, Deadline::after(10s, world.clock())));
  EXPECT_EQ(world.clock().now().ns, 5'000'000'000);
}

TEST(SimWorld, SilencesACrashedRankAndNotifiesPeersLater) {
  World world(1);
  auto [a, b] = world.connect(0, 1);
  std::string into_a(4, '\0'), into_b(4, '\0');
  Outcome survivor, dead;
  receive_text(*a, into_a, survivor.record());
  receive_text(*b, into_b, dead.record());
  int closes = 0;
  a->on_close([&](const Error& why) { closes += why.rank == 1 ? 1 : 100; });
  world.crash(1);
  ASSERT_TRUE(world.run_until([&] { return survivor.done(); }, Deadline::after(1s, world.clock())));
  EXPECT_EQ(survivor.result.error().code, ErrorCode::kPeerLost);
  EXPECT_EQ(survivor.result.error().rank, 1);
  EXPECT_EQ(world.clock().now().ns, 200'000'000);
  EXPECT_EQ(closes, 1);
  a.reset();
  b.reset();
  while (world.step()) {
  }
  EXPECT_EQ(dead.calls, 0);
}

TEST(SimWorld, DeliversDataSentBeforeACrash) {
  World world(1);
  auto [a, b] = world.connect(0, 1);
  Outcome sent, received, behind;
  send_text(*b, "last words", sent.record());
  world.crash(1);
  while (world.step()) {
  }
  std::string into(10, '\0');
  receive_text(*a, into, received.record());
  EXPECT_TRUE(received.ok());
  EXPECT_EQ(into, "last words");
  receive_text(*a, into, behind.record());
  EXPECT_EQ(behind.result.error().code, ErrorCode::kPeerLost);
}

TEST(SimWorld, HoldsAStoppedRankUntilItResumes) {
  World world(1);
  auto [a, b] = world.connect(0, 1);
  std::string into(3, '\0');
  Outcome sent, received;
  receive_text(*b, into, received.record());
  world.stop(1);
  send_text(*a, "abc", sent.record());
  while (world.step()) {
  }
  EXPECT_FALSE(received.done());
  EXPECT_TRUE(a->is_open());
  world.resume(1);
  while (world.step()) {
  }
  EXPECT_TRUE(received.ok());
  EXPECT_EQ(into, "abc");
}

TEST(SimWorld, BridgesAShortPartitionInOrder) {
  Faults faults;
  faults.short_read = 0.5;
  World world(3, faults);
  auto [a, b] = world.connect(0, 1);
  const std::string text = pattern(5'000'000);
  std::string into(text.size(), '\0');
  Outcome sent, received;
  receive_text(*b, into, received.record());
  send_text(*a, text, sent.record());
  for (int i = 1; i < 40; ++i) {
    world.at(TimePoint{i * 40'000}, [&, i] { i % 2 == 1 ? world.partition(1, 0) : world.heal(0, 1); });
  }
  world.at(TimePoint{40 * 40'000}, [&] { world.heal(0, 1); });
  ASSERT_TRUE(world.run_until([&] { return received.done(); }, Deadline::after(1s, world.clock())));
  EXPECT_TRUE(sent.ok() && received.ok());
  EXPECT_TRUE(into == text);
}

TEST(SimWorld, LosesBothEndsOfALastingPartition) {
  World world(1);
  auto [a, b] = world.connect(0, 1);
  auto [c, d] = world.connect(0, 2);
  std::string into_a(1, '\0'), into_b(1, '\0');
  Outcome lost_a, lost_b;
  receive_text(*a, into_a, lost_a.record());
  receive_text(*b, into_b, lost_b.record());
  world.partition(0, 1);
  ASSERT_TRUE(world.run_until([&] { return lost_a.done() && lost_b.done(); }, Deadline::after(1s, world.clock())));
  EXPECT_EQ(lost_a.result.error().rank, 1);
  EXPECT_EQ(lost_b.result.error().rank, 0);
  EXPECT_TRUE(c->is_open() && d->is_open());
}

TEST(SimWorld, MayEndBeforeItsLinks) {
  auto world = std::make_unique<World>(1);
  auto [a, b] = world->connect(0, 1);
  Outcome pending;
  std::string into(1, '\0');
  receive_text(*a, into, pending.record());
  send_text(*b, "x", [](Result<>) {});
  world.reset();
  b.reset();
  a.reset();
  EXPECT_EQ(pending.calls, 1);
  EXPECT_FALSE(pending.result);
}

TEST(SimWorld, Runs4096RanksThroughMillionsOfEvents) {
  constexpr int kRanks = 4096, kRounds = 300;  // every rank always has a token in flight
  World world(5);
  std::vector<std::unique_ptr<Link>> out(kRanks), in(kRanks);
  std::vector<std::string> tokens(kRanks, std::string(8, '\0'));
  std::vector<int> rounds(kRanks, 0);
  for (int r = 0; r < kRanks; ++r) std::tie(out[r], in[(r + 1) % kRanks]) = world.connect(r, (r + 1) % kRanks);
  int finished = 0;
  std::vector<std::function<void(Result<>)>> hop(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    hop[r] = [&, r](Result<> result) {
      ASSERT_TRUE(result);
      if (++rounds[r] == kRounds) ++finished;
      if (rounds[r] >= kRounds) return;
      send_text(*out[r], tokens[r], [](Result<>) {});
      receive_text(*in[r], tokens[r], hop[r]);
    };
    receive_text(*in[r], tokens[r], hop[r]);
    send_text(*out[r], tokens[r], [](Result<>) {});
  }
  ASSERT_TRUE(world.run_until([&] { return finished == kRanks; }, Deadline::after(60s, world.clock())));
  EXPECT_EQ(world.events(), static_cast<uint64_t>(kRanks) * kRounds);
}

}  // namespace
}  // namespace muster::sim
