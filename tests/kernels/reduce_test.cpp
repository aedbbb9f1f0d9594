// Runs once for each instruction set (MUSTER_SIMD, see CMakeLists.txt) and compares with the same definitions. So all
// instruction sets agree.
#include "muster/kernels/reduce.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <complex>
#include <cstdlib>
#include <vector>

#include "kernels/reduce_reference.h"
#include "muster/base/bytes.h"
#include "muster/base/random.h"

namespace muster::test {
namespace {

template <class T, Dtype kDtype>
struct Element {
  using Type = T;
  static constexpr Dtype kOf = kDtype;
};

template <class E>
std::vector<ReduceOp> ops() {
  std::vector<ReduceOp> all;
  for (int op = 0; op < kReduceOpCount; ++op) {
    if (check_reducible(E::kOf, static_cast<ReduceOp>(op))) all.push_back(static_cast<ReduceOp>(op));
  }
  return all;
}

// A value with random bits, so some floats are NaN, infinite or subnormal. One value in four is a boundary value.
template <class T>
T arbitrary(Random& random) {
  T value;
  uint64_t all = random.next();
  static constexpr uint64_t kEnds[] = {0, ~uint64_t{0}, uint64_t{1} << 63, ~uint64_t{0} >> 1, 1};
  if (random.chance(0.25)) all = kEnds[random.below(5)];
  all = all >> (64 - 8 * sizeof(T));
  std::memcpy(&value, &all, sizeof(T));
  if constexpr (std::is_floating_point_v<T>) {
    static constexpr T kSpecial[] = {0,
                                     -T{0},
                                     INFINITY,
                                     -INFINITY,
                                     NAN,
                                     std::numeric_limits<T>::denorm_min(),
                                     std::numeric_limits<T>::max(),
                                     std::numeric_limits<T>::min(),
                                     1,
                                     -1};
    if (random.chance(0.5)) value = kSpecial[random.below(10)];
  }
  if constexpr (std::is_same_v<T, Bool>) value.value &= random.chance(0.5) ? 1 : 0xff;
  return value;
}

/// An array of elements whose address may be unaligned.
template <class T>
class UnalignedArray {
 public:
  UnalignedArray(size_t count, size_t misalignment) : count_(count), bytes_(count * sizeof(T) + 64, 0xa5) {
    const size_t off = reinterpret_cast<uintptr_t>(bytes_.data()) % 16;
    start_ = 16 - off + misalignment;
  }
  UnalignedArray(const std::vector<T>& from, size_t misalignment) : UnalignedArray(from.size(), misalignment) {
    if (!from.empty()) std::memcpy(data(), from.data(), from.size() * sizeof(T));
  }
  void* data() { return bytes_.data() + start_; }
  T at(size_t index) const {
    T value;
    std::memcpy(&value, bytes_.data() + start_ + index * sizeof(T), sizeof(T));
    return value;
  }
  bool untouched_around() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < start_ || i >= start_ + count_ * sizeof(T)) && bytes_[i] != 0xa5) return false;
    }
    return true;
  }

 private:
  size_t count_;
  Bytes bytes_;
  size_t start_;
};

template <class T>
std::vector<T> many_arbitrary(size_t count, Random& random) {
  std::vector<T> values(count);
  for (T& value : values) value = arbitrary<T>(random);
  return values;
}

constexpr size_t kCounts[] = {0, 1, 2, 7, 15, 16, 31, 33, 63, 65, 127, 511, 512, 513, 1025, 4099};

template <class E>
class Reduce : public testing::Test {};

using Elements =
    testing::Types<Element<uint8_t, Dtype::kUint8>, Element<int8_t, Dtype::kInt8>, Element<uint16_t, Dtype::kUint16>,
                   Element<int16_t, Dtype::kInt16>, Element<uint32_t, Dtype::kUint32>, Element<int32_t, Dtype::kInt32>,
                   Element<uint64_t, Dtype::kUint64>, Element<int64_t, Dtype::kInt64>, Element<float, Dtype::kFloat32>,
                   Element<double, Dtype::kFloat64>, Element<Half, Dtype::kFloat16>,
                   Element<Bfloat16, Dtype::kBfloat16>, Element<Bool, Dtype::kBool>>;

struct ElementName {
  template <class E>
  static std::string GetName(int) {
    return name(E::kOf);
  }
};
TYPED_TEST_SUITE(Reduce, Elements, ElementName);

template <class T>
void expect_combined(UnalignedArray<T>& out, const std::vector<T>& a, const std::vector<T>& b, ReduceOp op) {
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(same(out.at(i), combined(a[i], b[i], op))) << name(op) << ", element " << i << " of " << a.size();
  }
  ASSERT_TRUE(out.untouched_around()) << name(op) << " of " << a.size();
}

TYPED_TEST(Reduce, MatchesThePlainDefinition) {
  using T = typename TypeParam::Type;
  Random random(1);
  for (const ReduceOp op : ops<TypeParam>()) {
    for (const size_t count : kCounts) {
      for (const size_t skew : {0, 1, 3}) {
        const auto left = many_arbitrary<T>(count, random), right = many_arbitrary<T>(count, random);
        UnalignedArray<T> a(left, skew), b(right, 2 * skew), out(count, 5 * skew);
        reduce_two(out.data(), a.data(), b.data(), count, TypeParam::kOf, op);
        ASSERT_NO_FATAL_FAILURE(expect_combined(out, left, right, op));
      }
    }
  }
}

TYPED_TEST(Reduce, WritesOverEitherOperand) {
  using T = typename TypeParam::Type;
  Random random(2);
  for (const ReduceOp op : ops<TypeParam>()) {
    for (const size_t count : kCounts) {
      const auto left = many_arbitrary<T>(count, random), right = many_arbitrary<T>(count, random);
      UnalignedArray<T> into(left, 1), a(left, 0), b(right, 0), over_a(left, 1), over_b(right, 1);
      reduce_into(into.data(), b.data(), count, TypeParam::kOf, op);
      reduce_two(over_a.data(), over_a.data(), b.data(), count, TypeParam::kOf, op);
      reduce_two(over_b.data(), a.data(), over_b.data(), count, TypeParam::kOf, op);
      for (UnalignedArray<T>* out : {&into, &over_a, &over_b})
        ASSERT_NO_FATAL_FAILURE(expect_combined(*out, left, right, op));
    }
  }
}

// Combines several sources. Half-precision values are rounded only once at the end, so the result differs from a chain
// of binary operations.
template <class T>
T chain(const std::vector<std::vector<T>>& in, size_t index, ReduceOp op) {
  if constexpr (kIsHalf<T>) {
    float sum = widen(in[0][index]);
    for (size_t s = 1; s < in.size(); ++s) sum = combined(sum, widen(in[s][index]), op);
    return narrow(sum, T{});
  } else {
    T sum = in[0][index];
    for (size_t s = 1; s < in.size(); ++s) sum = combined(sum, in[s][index], op);
    return sum;
  }
}

TYPED_TEST(Reduce, CombinesManySourcesInOrder) {
  using T = typename TypeParam::Type;
  Random random(3);
  for (const ReduceOp op : ops<TypeParam>()) {
    for (const int sources : {2, 3, 4, 9}) {
      for (const size_t count : {1, 511, 513, 1500}) {
        for (int target = -1; target < sources; ++target) {  // -1: the output is separate memory
          std::vector<std::vector<T>> values;
          std::vector<UnalignedArray<T>> in;
          for (int s = 0; s < sources; ++s)
            in.emplace_back(values.emplace_back(many_arbitrary<T>(count, random)), s % 3);
          std::vector<const void*> pointers;
          for (UnalignedArray<T>& source : in) pointers.push_back(source.data());
          UnalignedArray<T> separate(count, 1);
          UnalignedArray<T>& out = target < 0 ? separate : in[target];
          reduce_many(out.data(), pointers.data(), sources, count, TypeParam::kOf, op);
          for (size_t i = 0; i < count; ++i) {
            ASSERT_TRUE(same(out.at(i), chain(values, i, op))) << name(op) << " of " << sources << ", element " << i;
          }
          ASSERT_TRUE(out.untouched_around());
        }
      }
    }
  }
}

TYPED_TEST(Reduce, CopiesASingleSource) {
  using T = typename TypeParam::Type;
  Random random(4);
  const auto values = many_arbitrary<T>(77, random);
  UnalignedArray<T> in(values, 1), out(77, 3);
  const void* const source = in.data();
  reduce_many(out.data(), &source, 1, 77, TypeParam::kOf, ops<TypeParam>()[0]);
  EXPECT_EQ(std::memcmp(out.data(), in.data(), 77 * sizeof(T)), 0);
}

TYPED_TEST(Reduce, DividesByTheNumberOfRanks) {
  using T = typename TypeParam::Type;
  if constexpr (!std::is_same_v<T, Bool>) {
    Random random(5);
    for (const int divisor : {1, 2, 3, 7, 1000, 100000}) {
      const auto values = many_arbitrary<T>(1000, random);
      UnalignedArray<T> data(values, 1);
      divide_by(data.data(), 1000, TypeParam::kOf, divisor);
      for (size_t i = 0; i < 1000; ++i) {
        T wanted;
        if constexpr (kIsHalf<T>) {
          wanted = narrow(widen(values[i]) / static_cast<float>(divisor), T{});
        } else if constexpr (std::is_floating_point_v<T>) {
          wanted = values[i] / static_cast<T>(divisor);
        } else if constexpr (std::is_signed_v<T>) {
          wanted = static_cast<T>(static_cast<int64_t>(values[i]) / divisor);
        } else {
          wanted = static_cast<T>(static_cast<uint64_t>(values[i]) / static_cast<uint64_t>(divisor));
        }
        ASSERT_TRUE(same(data.at(i), wanted)) << "element " << i << " by " << divisor;
      }
      ASSERT_TRUE(data.untouched_around());
    }
  }
}

TYPED_TEST(Reduce, AveragesManySourcesAndRoundsOnce) {
  using T = typename TypeParam::Type;
  if constexpr (!std::is_same_v<T, Bool>) {
    Random random(9);
    for (const int sources : {1, 2, 3, 9}) {
      std::vector<std::vector<T>> values;
      std::vector<UnalignedArray<T>> in;
      for (int s = 0; s < sources; ++s) in.emplace_back(values.emplace_back(many_arbitrary<T>(1025, random)), s % 3);
      std::vector<const void*> pointers;
      for (UnalignedArray<T>& source : in) pointers.push_back(source.data());
      UnalignedArray<T> wanted(1025, 1);
      reduce_many(wanted.data(), pointers.data(), sources, 1025, TypeParam::kOf, ReduceOp::kSum);
      divide_by(wanted.data(), 1025, TypeParam::kOf, sources);
      average_many(in[0].data(), pointers.data(), sources, 1025, TypeParam::kOf);
      for (size_t i = 0; i < 1025; ++i) {
        T mean = wanted.at(i);
        if constexpr (kIsHalf<T>) {
          float sum = widen(values[0][i]);
          for (int s = 1; s < sources; ++s) sum += widen(values[s][i]);
          mean = narrow(sum / static_cast<float>(sources), T{});
        }
        ASSERT_TRUE(same(in[0].at(i), mean)) << "element " << i << " of " << sources;
      }
      ASSERT_TRUE(in[0].untouched_around());
    }
  }
}

TYPED_TEST(Reduce, MultipliesByAFactor) {
  using T = typename TypeParam::Type;
  if constexpr (std::is_floating_point_v<T> || kIsHalf<T>) {
    Random random(8);
    for (const double factor : {1.0, 0.0, -2.5, 1.0 / 3, 1e-30}) {
      const auto values = many_arbitrary<T>(1025, random);
      UnalignedArray<T> in(values, 1), out(1025, 3), same_memory(values, 1);
      scale(out.data(), in.data(), 1025, TypeParam::kOf, factor);
      scale(same_memory.data(), same_memory.data(), 1025, TypeParam::kOf, factor);
      for (size_t i = 0; i < values.size(); ++i) {
        T wanted;
        if constexpr (kIsHalf<T>) {
          wanted = narrow(widen(values[i]) * static_cast<float>(factor), T{});
        } else {
          wanted = values[i] * static_cast<T>(factor);
        }
        ASSERT_TRUE(same(out.at(i), wanted)) << "element " << i << " by " << factor;
        ASSERT_TRUE(same(same_memory.at(i), wanted)) << "element " << i << " by " << factor << ", in place";
      }
      ASSERT_TRUE(out.untouched_around());
    }
  }
}

template <class T>
class ReduceComplex : public testing::Test {};
using Reals = testing::Types<float, double>;
TYPED_TEST_SUITE(ReduceComplex, Reals);

TYPED_TEST(ReduceComplex, AddsMultipliesAndDivides) {
  using T = TypeParam;
  const Dtype dtype = sizeof(T) == 4 ? Dtype::kComplex64 : Dtype::kComplex128;
  Random random(6);
  for (const size_t count : kCounts) {
    std::vector<std::complex<T>> a, b, sum(count), product(count);
    for (size_t i = 0; i < count; ++i) {
      a.emplace_back(static_cast<T>(random.uniform()), static_cast<T>(random.uniform()));
      b.emplace_back(static_cast<T>(random.uniform()), static_cast<T>(-random.uniform()));
    }
    reduce_two(sum.data(), a.data(), b.data(), count, dtype, ReduceOp::kAverage);
    divide_by(sum.data(), count, dtype, 3);
    reduce_two(product.data(), a.data(), b.data(), count, dtype, ReduceOp::kProduct);
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(sum[i].real(), (a[i].real() + b[i].real()) / 3);
      ASSERT_EQ(sum[i].imag(), (a[i].imag() + b[i].imag()) / 3);
      const std::complex<T> wanted = a[i] * b[i];
      ASSERT_NEAR(product[i].real(), wanted.real(), 4 * std::numeric_limits<T>::epsilon());
      ASSERT_NEAR(product[i].imag(), wanted.imag(), 4 * std::numeric_limits<T>::epsilon());
    }
  }
}

TEST(ReduceComplex32, MultipliesInFloat32AndRoundsOnce) {
  Random random(7);
  std::vector<Half> a, b, out(2 * 1001);
  for (Half& unused : out) {
    (void)unused;
    a.push_back(narrow(static_cast<float>(random.uniform()), Half{}));
    b.push_back(narrow(static_cast<float>(random.uniform() - 0.5), Half{}));
  }
  reduce_two(out.data(), a.data(), b.data(), 1001, Dtype::kComplex32, ReduceOp::kProduct);
  for (size_t i = 0; i < out.size(); i += 2) {
    const float ar = widen(a[i]), ai = widen(a[i + 1]), br = widen(b[i]), bi = widen(b[i + 1]);
    // Each product is rounded, so the compiler must not fuse operations.
    const float right = ar * br, left = ai * bi, up = ar * bi, down = ai * br;
    ASSERT_EQ(out[i].bits, narrow(right - left, Half{}).bits);
    ASSERT_EQ(out[i + 1].bits, narrow(up + down, Half{}).bits);
  }
}

template <class H>
void check_all_values(Dtype dtype, const std::vector<uint16_t>& others) {
  std::vector<H> all(65536), other(65536), out(65536);
  for (uint32_t i = 0; i < 65536; ++i) all[i].bits = static_cast<uint16_t>(i);
  for (const uint16_t bits : others) {
    other.assign(65536, H{bits});
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax}) {
      reduce_two(out.data(), all.data(), other.data(), 65536, dtype, op);
      for (uint32_t i = 0; i < 65536; ++i) {
        ASSERT_TRUE(same(out[i], combined(all[i], other[i], op)))
            << std::hex << i << " " << name(op) << " " << bits << " is " << out[i].bits;
      }
    }
  }
}

TEST(ReduceFloat16, IsRightForEveryValueWithAHandfulOfOthers) {
  check_all_values<Half>(Dtype::kFloat16, {0x0000, 0x8000, 0x0001, 0x83ff, 0x0400, 0x1001, 0x3555, 0x3c00, 0xbc01,
                                           0x4248, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x7d01});
}
TEST(ReduceBfloat16, IsRightForEveryValueWithAHandfulOfOthers) {
  check_all_values<Bfloat16>(Dtype::kBfloat16, {0x0000, 0x8000, 0x0001, 0x807f, 0x0080, 0x3eab, 0x3f80, 0xbf81, 0x4049,
                                                0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0x7f81});
}

// The bits of a NaN result must not depend on the instruction set, or on which operand was NaN.
TEST(ReduceFloat32, GivesTheSameNanForAllInputs) {
  std::vector<float> a(37), b(37), out(37);
  for (size_t i = 0; i < a.size(); ++i) {
    const uint32_t left = 0x7f800001u + static_cast<uint32_t>(i) * 4099, right = 0xffc00000u + static_cast<uint32_t>(i);
    std::memcpy(&a[i], &left, 4);
    std::memcpy(&b[i], &right, 4);
  }
  a[36] = INFINITY;
  b[36] = -INFINITY;
  reduce_two(out.data(), a.data(), b.data(), out.size(), Dtype::kFloat32, ReduceOp::kSum);
  for (const float value : out) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    EXPECT_EQ(bits, 0x7fc00000u);
  }
}

TEST(ReduceKernels, ObeyTheEnvironment) {
  const char* const wanted = std::getenv("MUSTER_SIMD");
  const std::string isa = reduce_kernel_isa();
  if (wanted != nullptr && std::string(wanted) == "baseline") {
    EXPECT_EQ(isa, "baseline");
  } else {
    EXPECT_THAT((std::vector<std::string>{"baseline", "avx2", "avx512"}), testing::Contains(isa));
  }
  RecordProperty("isa", isa);
}

TEST(ReduceDeathTest, RefusesUnsupportedReductions) {
  float data[2] = {};
  EXPECT_DEATH(reduce_into(data, data, 2, Dtype::kFloat32, ReduceOp::kBitAnd), "band of float32");
  EXPECT_DEATH(reduce_into(data, data, 2, Dtype::kFloat8E5m2, ReduceOp::kSum), "sum of float8_e5m2");
  EXPECT_DEATH(divide_by(data, 2, Dtype::kFloat32, 0), "divisor");
  EXPECT_DEATH(scale(data, data, 2, Dtype::kInt32, 0.5), "fraction of int32");
}

}  // namespace
}  // namespace muster::test
