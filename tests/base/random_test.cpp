#include "muster/base/random.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace muster {
namespace {

TEST(Random, TheSameSeedGivesTheSameRun) {
  Random a(42), b(42), c(43);
  bool differs = false;
  for (int i = 0; i < 100; ++i) {
    const uint64_t value = a.next();
    ASSERT_EQ(value, b.next());
    differs |= value != c.next();
  }
  EXPECT_TRUE(differs);
}

TEST(Random, StaysWithinItsBoundsAndReachesAllOfThem) {
  Random random(7);
  std::vector<int> seen(10);
  for (int i = 0; i < 10'000; ++i) {
    ++seen.at(random.below(10));
    const uint64_t between = random.between(5, 6);
    ASSERT_TRUE(between == 5 || between == 6);
    ASSERT_LT(random.uniform(), 1.0);
  }
  for (const int count : seen) EXPECT_GT(count, 800);  // 1,000 expected; the standard deviation is 30
}

TEST(Random, SecureRandomBytesDiffer) {
  std::array<uint8_t, 32> a{}, b{};
  fill_secure_random(a);
  fill_secure_random(b);
  EXPECT_NE(a, b);
}

}  // namespace
}  // namespace muster
