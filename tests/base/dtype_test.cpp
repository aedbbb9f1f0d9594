#include "muster/base/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace muster {
namespace {

TEST(Dtype, HasANameAndASizeForEach) {
  std::set<std::string> names;
  for (int i = 0; i < kDtypeCount; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_GT(size_of(dtype), 0u);
    names.insert(name(dtype));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kDtypeCount));
  EXPECT_EQ(size_of(Dtype::kComplex128), 16u);
  EXPECT_EQ(size_of(Dtype::kBfloat16), 2u);
  EXPECT_STREQ(name(Dtype::kFloat8E4m3fn), "float8_e4m3fn");
}

TEST(Dtype, NumbersOnTheWireNeverChange) {
  EXPECT_EQ(static_cast<int>(Dtype::kFloat32), 6);
  EXPECT_EQ(static_cast<int>(Dtype::kBfloat16), 12);
  EXPECT_EQ(static_cast<int>(Dtype::kFloat4E2m1fnX2), 21);
  EXPECT_EQ(static_cast<int>(Dtype::kBits16), 23);
  EXPECT_EQ(static_cast<int>(Dtype::kBcomplex32), 24);
  EXPECT_EQ(static_cast<int>(ReduceOp::kBitXor), 7);
  EXPECT_EQ(static_cast<int>(ReduceOp::kPremulSum), 8);
  EXPECT_STREQ(name(ReduceOp::kPremulSum), "premul_sum");
}

TEST(Dtype, RefusesUndefinedReductions) {
  EXPECT_TRUE(check_reducible(Dtype::kFloat32, ReduceOp::kAverage));
  EXPECT_TRUE(check_reducible(Dtype::kBool, ReduceOp::kMax));
  EXPECT_FALSE(check_reducible(Dtype::kBool, ReduceOp::kAverage));
  EXPECT_FALSE(check_reducible(Dtype::kFloat64, ReduceOp::kBitAnd));
  EXPECT_FALSE(check_reducible(Dtype::kComplex64, ReduceOp::kMin));
  EXPECT_TRUE(check_reducible(Dtype::kComplex64, ReduceOp::kPremulSum));
  EXPECT_FALSE(check_reducible(Dtype::kInt32, ReduceOp::kPremulSum));
  const auto refused = check_reducible(Dtype::kFloat8E5m2, ReduceOp::kSum);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(refused.error().message, "float8_e5m2 cannot be reduced with sum");
  EXPECT_FALSE(check_reducible(static_cast<Dtype>(99), ReduceOp::kSum));
}

}  // namespace
}  // namespace muster
