#include "muster/base/wait_policy.h"

#include <gtest/gtest.h>

#include <vector>

#include "io/yields.h"

namespace muster {
namespace {

/// A clock that advances with every yield.
class YieldClock final : public Clock {
 public:
  TimePoint now() const override { return start + (test::yields() - before) * each; }
  const long before = test::yields();
  TimePoint start{1'000};
  Duration each{};
};

TEST(YieldBudget, YieldsAsOftenAsRequestedWhileCheap) {
  YieldClock clock;
  clock.each = 1ms;
  YieldBudget budget(1ms, clock);
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(budget.yield());
  EXPECT_EQ(test::yields() - clock.before, 100);
}

TEST(YieldBudget, SpendsLittleTimeOnYieldsThatTakeLong) {
  YieldClock clock;
  clock.each = 4ms;
  YieldBudget budget(1ms, clock);
  const auto spend = [&] {
    int yields = 0;
    while (budget.yield()) ++yields;
    return yields;
  };
  const int burst = spend();
  EXPECT_GE(burst, 20ms / clock.each);
  EXPECT_LE(burst, 20ms / clock.each + 1);
  EXPECT_EQ(test::yields() - clock.before, burst) << "a refused yield must not yield";
  clock.start = clock.start + 64 * clock.each;
  EXPECT_EQ(spend(), 1) << "the other thread may have gone";
  clock.start = clock.start + 10 * 64 * 20ms;
  EXPECT_EQ(spend(), burst) << "a long pause buys one burst, not ten";
}

TEST(AdaptiveWait, HalvesTheSpinAfterAParkAndDoublesItAfterSuccess) {
  AdaptiveWait wait(true, 1s);
  EXPECT_EQ(wait.spins(), kMaxSpins);
  int polls = 0;
  const auto never = [&] { return ++polls < 0; };
  EXPECT_FALSE(wait.spin(never));
  EXPECT_EQ(polls, kMaxSpins);
  EXPECT_FALSE(wait.yield(never));
  EXPECT_EQ(wait.spins(), kMaxSpins / 2);
  EXPECT_TRUE(wait.spin([] { return true; }));
  EXPECT_EQ(wait.spins(), kMaxSpins);
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(wait.yield(never));
  EXPECT_EQ(wait.spins(), kMinSpins);
}

TEST(AdaptiveWait, SpinsLittleIfThreadsShareCores) {
  AdaptiveWait wait(true, 1s);
  wait.set_own_core(false);
  EXPECT_TRUE(wait.spin([] { return true; }));
  EXPECT_EQ(wait.spins(), kMinSpins);
  wait.set_own_core(true);
  EXPECT_EQ(wait.spins(), kMaxSpins);
}

TEST(AdaptiveWait, YieldsAFewTimesBeforeAPark) {
  AdaptiveWait wait(true, 1s);
  const long before = test::yields();
  EXPECT_FALSE(wait.yield([] { return false; }));
  EXPECT_EQ(test::yields() - before, kYieldsBeforePark);
  EXPECT_TRUE(wait.yield([] { return true; }));
  EXPECT_EQ(test::yields() - before, kYieldsBeforePark + 1);
}

/// One wait of a link that parks, and is woken after `sleep`. Returns how long it polled before.
Duration spin_and_park(LinkSpin& spin, TimePoint& now, Duration sleep, Duration poll = 1us) {
  spin.restart();
  const TimePoint begin = now;
  while (!spin.is_over(now)) now = now + poll;
  const Duration spun = now - begin;
  spin.park();
  now = now + sleep;
  spin.wake(now);
  return spun;
}

TEST(LinkSpin, GrowsIfTheLongestSpinWouldDoAndShrinksOtherwise) {
  LinkSpin spin;
  TimePoint now = steady_clock().now();
  std::vector<Duration> spins;
  for (const Duration sleep : {90us, 90us, 90us, 5000us, 5000us}) spins.push_back(spin_and_park(spin, now, sleep));
  EXPECT_EQ(spins, (std::vector<Duration>{50us, 100us, 200us, 100us, 50us}));
}

TEST(LinkSpin, StaysShortOnASharedCore) {
  LinkSpin spin;
  TimePoint now = steady_clock().now();
  EXPECT_EQ(spin_and_park(spin, now, 100us), 50us);
  EXPECT_EQ(spin_and_park(spin, now, 100us, 25us), 100us);
  EXPECT_EQ(spin_and_park(spin, now, 100us, 25us), 50us);
  EXPECT_EQ(spin_and_park(spin, now, 100us), 50us);
  EXPECT_EQ(spin_and_park(spin, now, 100us), 100us);
}

TEST(LinkSpin, BeginsWithTheFirstPoll) {
  LinkSpin spin;
  TimePoint now = steady_clock().now();
  spin.restart();
  EXPECT_FALSE(spin.is_over(now));
  now = now + 40us;  // later than the thread polls if it is alone
  EXPECT_FALSE(spin.is_over(now));
  spin.restart();
  now = now + 1000us;  // the thread has handled what arrived
  EXPECT_FALSE(spin.is_over(now));
  EXPECT_TRUE(spin.is_over(now + kMinLinkSpin));
}

TEST(PollWait, YieldsAfterSomeIdlePolls) {
  PollWait wait(3);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(wait.idle());
  EXPECT_TRUE(wait.idle());
  wait.reset();
  EXPECT_FALSE(wait.idle());
}

}  // namespace
}  // namespace muster
