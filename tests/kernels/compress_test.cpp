// Runs once for each instruction set (see CMakeLists.txt) and compares with the same definitions. So all instruction
// sets agree to the bit.
#include "muster/kernels/compress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "muster/base/random.h"
#include "muster/kernels/reduce.h"

namespace muster {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> arbitrary(size_t count, uint64_t seed, double size = 1) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>((random.uniform() - 0.5) * size);
  return values;
}

constexpr size_t kCounts[] = {1, 7, 15, 16, 17, 255, 256, 257, 1000, 4099};

TEST(Compress, NarrowingIsScalingInFloatAndRoundingOnce) {
  for (const Dtype half : {Dtype::kFloat16, Dtype::kBfloat16}) {
    for (const size_t count : kCounts) {
      const std::vector<float> in = arbitrary(count, count, 1e5);
      std::vector<uint16_t> halves(count), reference(count);
      std::vector<float> scaled(count), out(count);
      for (size_t i = 0; i < count; ++i) scaled[i] = in[i] * 0.25F;
      narrow(halves.data(), in.data(), count, half, 0.25F);
      narrow(reference.data(), scaled.data(), count, half, 1);
      EXPECT_EQ(halves, reference);
      widen(out.data(), halves.data(), count, half);
      const float last_place = half == Dtype::kFloat16 ? 0x1p-11F : 0x1p-8F;
      for (size_t i = 0; i < count; ++i) EXPECT_LE(std::abs(out[i] - scaled[i]), std::abs(scaled[i]) * last_place);
    }
  }
}

TEST(Compress, Float16OverflowIsInfinite) {
  const std::vector<float> in = {65504, 65520, -1e6F, 131008, NAN};
  std::vector<uint16_t> halves(5);
  std::vector<float> out(5);
  narrow(halves.data(), in.data(), 5, Dtype::kFloat16, 1);
  widen(out.data(), halves.data(), 5, Dtype::kFloat16);
  EXPECT_EQ(out[0], 65504);
  EXPECT_EQ(out[1], kInfinity);
  EXPECT_EQ(out[2], -kInfinity);
  EXPECT_EQ(out[3], kInfinity);
  EXPECT_TRUE(std::isnan(out[4]));
  narrow(halves.data(), in.data(), 5, Dtype::kFloat16, 0.5F);
  widen(out.data(), halves.data(), 5, Dtype::kFloat16);
  EXPECT_EQ(out[3], 65504) << "scaled before it is rounded";
}

TEST(Compress, Int8IsTheNearestMultipleOfTheBlocksScale) {
  constexpr size_t kBlock = 256;
  for (const size_t count : kCounts) {
    const std::vector<float> in = arbitrary(count, count), before = arbitrary(count, count + 1, 0.01);
    std::vector<float> error = before, scales((count + kBlock - 1) / kBlock), out(count);
    std::vector<int8_t> bytes(count);
    quantize(bytes.data(), scales.data(), in.data(), 0.5F, error.data(), count, kBlock);
    dequantize(out.data(), bytes.data(), scales.data(), count, kBlock);
    for (size_t i = 0; i < count; ++i) {
      float greatest = 0;
      for (size_t j = i / kBlock * kBlock; j < std::min(count, (i / kBlock + 1) * kBlock); ++j) {
        greatest = std::max(greatest, std::abs(in[j] * 0.5F + before[j]));
      }
      const float value = in[i] * 0.5F + before[i], scale = greatest / 127;
      ASSERT_EQ(scales[i / kBlock], scale);
      ASSERT_EQ(bytes[i], static_cast<int8_t>(std::nearbyint(value * (127 / greatest)))) << i << " of " << count;
      ASSERT_EQ(out[i], scale * static_cast<float>(bytes[i]));
      ASSERT_EQ(error[i], value - out[i]) << "what was lost is kept";
    }
  }
}

TEST(Compress, Int8SumsMatchTheSentValues) {
  constexpr size_t kCount = 700, kBlock = 64;
  std::vector<float> sum(kCount), expected(kCount), scales(11), out(kCount);
  std::vector<int8_t> bytes(kCount);
  for (uint64_t source = 0; source < 3; ++source) {
    std::vector<float> error(kCount);
    quantize(bytes.data(), scales.data(), arbitrary(kCount, source).data(), 1, error.data(), kCount, kBlock);
    dequantize(out.data(), bytes.data(), scales.data(), kCount, kBlock);
    add_quantized(sum.data(), bytes.data(), scales.data(), kCount, kBlock);
    for (size_t i = 0; i < kCount; ++i) expected[i] += out[i];
  }
  EXPECT_EQ(sum, expected);
}

TEST(Compress, NonFiniteBlocksStayVisibleAndResetTheError) {
  for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
    std::vector<float> in = arbitrary(96, 1), error = arbitrary(96, 2), scales(3), out(96);
    std::vector<int8_t> bytes(96);
    in[40] = bad;
    quantize(bytes.data(), scales.data(), in.data(), 1, error.data(), 96, 32);
    dequantize(out.data(), bytes.data(), scales.data(), 96, 32);
    for (size_t i = 0; i < 96; ++i) {
      EXPECT_EQ(std::isnan(out[i]), i / 32 == 1);
      EXPECT_TRUE(std::isfinite(error[i]));
    }
  }
}

TEST(Compress, BlocksTooSmallForAScaleWaitInTheError) {
  std::vector<float> in = {1e-42F, -1e-30F, 0}, error(3), scales(1);
  std::vector<int8_t> bytes = {1, 1, 1};
  quantize(bytes.data(), scales.data(), in.data(), 1, error.data(), 3, 4);
  EXPECT_EQ(scales[0], 0);
  EXPECT_EQ(bytes, std::vector<int8_t>(3));
  EXPECT_EQ(error, in);
}

TEST(Compress, TheLargestAreFoundInOrderOfPosition) {
  for (const size_t count : kCounts) {
    std::vector<float> in = arbitrary(count, count);
    for (const size_t wanted : {size_t{1}, (count + 9) / 10, count}) {
      std::vector<uint32_t> positions(wanted);
      select_largest(positions.data(), wanted, in.data(), count);
      EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end(), std::less_equal<>())) << "ascending, none twice";
      std::vector<float> sorted(count);
      std::transform(in.begin(), in.end(), sorted.begin(), [](float x) { return std::abs(x); });
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      for (const uint32_t position : positions) EXPECT_GE(std::abs(in[position]), sorted[wanted - 1] * (1 - 0x1p-7F));
    }
  }
  const std::vector<float> equal(100, -2), special = {1, -kInfinity, std::nanf(""), 0, 3e38F};
  std::vector<uint32_t> positions(3);
  select_largest(positions.data(), 3, equal.data(), 100);
  EXPECT_EQ(positions, (std::vector<uint32_t>{0, 1, 2})) << "the first of equals";
  select_largest(positions.data(), 3, special.data(), 5);
  EXPECT_EQ(positions, (std::vector<uint32_t>{1, 2, 4}));
}

TEST(Compress, AMatrixOfLowRankIsFoundInOneStep) {
  for (const auto& [rows, columns] : {std::pair<size_t, size_t>{5, 67}, {40, 3}, {33, 1030}}) {
    constexpr size_t kRank = 2;
    const std::vector<float> a = arbitrary(rows * kRank, 1), b = arbitrary(kRank * columns, 2);
    std::vector<float> m(rows * columns), zeros(rows * columns), p(rows * kRank), q = arbitrary(kRank * columns, 3);
    std::vector<float> out(rows * columns);
    expand(m.data(), zeros.data(), a.data(), b.data(), rows, columns, kRank);
    std::vector<float> error = m;
    project_rows(p.data(), m.data(), q.data(), rows, columns, kRank);
    orthogonalize(p.data(), rows, kRank);
    project_columns(q.data(), m.data(), p.data(), rows, columns, kRank);
    expand(out.data(), error.data(), p.data(), q.data(), rows, columns, kRank);
    for (size_t i = 0; i < m.size(); ++i) {
      ASSERT_NEAR(out[i], m[i], 1e-5);
      ASSERT_EQ(error[i], m[i] - out[i]);
    }
  }
}

TEST(Compress, DependentColumnsBecomeZeroAndOthersOrthonormal) {
  constexpr size_t kRows = 20, kRank = 3;
  std::vector<float> p = arbitrary(kRows * kRank, 5);
  for (size_t i = 0; i < kRows; ++i) p[i * kRank + 1] = 3 * p[i * kRank];
  orthogonalize(p.data(), kRows, kRank);
  const auto product = [&p](size_t a, size_t b) {
    double sum = 0;
    for (size_t i = 0; i < kRows; ++i) sum += static_cast<double>(p[i * kRank + a]) * p[i * kRank + b];
    return sum;
  };
  EXPECT_NEAR(product(0, 0), 1, 1e-6);
  EXPECT_EQ(product(1, 1), 0);
  EXPECT_NEAR(product(2, 2), 1, 1e-6);
  EXPECT_NEAR(product(0, 2), 0, 1e-6);
}

}  // namespace
}  // namespace muster
