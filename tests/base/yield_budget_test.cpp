#include "muster/base/yield_budget.h"

#include <gtest/gtest.h>

#include "io/yields.h"

namespace muster {
namespace {

/// Time passes with every yield.
class YieldClock final : public Clock {
 public:
  TimePoint now() const override { return start + (test::yields() - before) * each; }
  const long before = test::yields();
  TimePoint start{1'000};
  Duration each{};
};

TEST(YieldBudget, YieldsAsOftenAsAskedWhileThatIsCheap) {
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
  EXPECT_TRUE(budget.yield());
  EXPECT_FALSE(budget.yield());
  EXPECT_EQ(test::yields() - clock.before, 1);
  clock.start = clock.start + (64 * clock.each - Duration(1));
  EXPECT_FALSE(budget.yield());
  clock.start = clock.start + Duration(1);
  EXPECT_TRUE(budget.yield()) << "the other thread may have gone";
  EXPECT_FALSE(budget.yield());
}

}  // namespace
}  // namespace muster
