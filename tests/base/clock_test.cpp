#include "muster/base/clock.h"

#include <gtest/gtest.h>

#include <limits>

namespace muster {
namespace {

class ManualClock final : public Clock {
 public:
  TimePoint now() const override { return time; }
  TimePoint time{1'000};
};

TEST(Deadline, PassesWhenItsClockReachesIt) {
  ManualClock clock;
  const auto deadline = Deadline::after(Duration(500), clock);
  EXPECT_FALSE(deadline.passed());
  EXPECT_EQ(deadline.left(), Duration(500));
  clock.time.ns = 1'499;
  EXPECT_FALSE(deadline.passed());
  clock.time.ns = 1'500;
  EXPECT_TRUE(deadline.passed());
  clock.time.ns = 9'999;
  EXPECT_EQ(deadline.left(), Duration::zero());
}

TEST(Deadline, SaturatesAHugeTimeout) {
  ManualClock clock;
  EXPECT_FALSE(Deadline::after(Duration::max(), clock).passed());
  EXPECT_EQ(Deadline::after(Duration::max(), clock).poll_timeout_ms(), std::numeric_limits<int>::max());
  EXPECT_EQ(Deadline::after(Duration::max(), clock).left(), std::chrono::hours(24 * 365));
}

TEST(Deadline, PollTimeoutsRoundUpSoThatAPollNeverEndsEarly) {
  ManualClock clock;
  EXPECT_EQ(Deadline::after(Duration(1), clock).poll_timeout_ms(), 1);
  EXPECT_EQ(Deadline::after(2ms, clock).poll_timeout_ms(), 2);
  EXPECT_EQ(Deadline::after(Duration(0), clock).poll_timeout_ms(), 0);
}

TEST(Deadline, ReturnsTheEarlierOfTwo) {
  ManualClock clock;
  const auto deadline = Deadline::after(Duration(500), clock);
  EXPECT_EQ(deadline.or_sooner(TimePoint{1'100}).when().ns, 1'100);
  EXPECT_EQ(deadline.or_sooner(TimePoint{9'100}).when().ns, 1'500);
}

TEST(SteadyClock, DoesNotRunBackwards) {
  TimePoint last = steady_clock().now();
  for (int i = 0; i < 1000; ++i) {
    const TimePoint now = steady_clock().now();
    ASSERT_GE(now, last);
    last = now;
  }
}

}  // namespace
}  // namespace muster
