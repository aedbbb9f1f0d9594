#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "muster/base/dtype.h"

namespace muster::test {

// Plain definitions, one element at a time. The tests compare the kernels with them. Half-precision values are rounded
// with double and nearbyint(), which shares no code with the bit arithmetic of the kernels.

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};
struct Bool {
  uint8_t value;
};

/// Rounds `value` to `digits` significant binary digits, to nearest even, with an exponent of at least `least`.
inline double rounded(double value, int digits, int least) {
  int exponent;
  std::frexp(value, &exponent);
  const double place = std::ldexp(1.0, std::max(exponent - digits, least));
  return std::nearbyint(value / place) * place;
}

inline float widen(Half half) {
  const int exponent = half.bits >> 10 & 0x1f, fraction = half.bits & 0x3ff;
  const double sign = (half.bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 0x1f && fraction != 0) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0x1f) return static_cast<float>(sign * INFINITY);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
  return static_cast<float>(sign * magnitude);
}
inline float widen(Bfloat16 input) {
  const uint32_t all = static_cast<uint32_t>(input.bits) << 16;
  float value;
  std::memcpy(&value, &all, sizeof(value));
  return value;
}

inline Half narrow(float value, Half) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double magnitude = std::isfinite(value) ? rounded(std::fabs(value), 11, -24) : std::fabs(value);
  if (std::isnan(value)) return {0x7e00};
  if (magnitude > 65504) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (magnitude < std::ldexp(1.0, -14)) return {static_cast<uint16_t>(sign | static_cast<int>(magnitude * 0x1p24))};
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);
  const int all = (exponent + 14) << 10 | (static_cast<int>(fraction * 2048) & 0x3ff);
  return {static_cast<uint16_t>(sign | all)};
}
inline Bfloat16 narrow(float value, Bfloat16) {
  if (std::isnan(value)) return {0x7fc0};
  const double magnitude = std::isfinite(value) ? rounded(std::fabs(value), 8, -133) : INFINITY;
  const float kept = std::copysign(static_cast<float>(magnitude), value);
  uint32_t all;
  std::memcpy(&all, &kept, sizeof(all));
  return {static_cast<uint16_t>(all >> 16)};
}

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, Half> || std::is_same_v<T, Bfloat16>;

/// a op b for numbers. Integers wrap. If an operand is NaN, the result is NaN, also for minimum and maximum.
template <class T>
T combined(T a, T b, ReduceOp op) {
  const auto wrapped = [](auto whole) { return static_cast<T>(whole); };
  if constexpr (std::is_integral_v<T>) {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
        return wrapped(x + y);
      case ReduceOp::kProduct:
        return wrapped(x * y);
      case ReduceOp::kMin:
        return b < a ? b : a;
      case ReduceOp::kMax:
        return b > a ? b : a;
      case ReduceOp::kBitAnd:
        return wrapped(x & y);
      case ReduceOp::kBitOr:
        return wrapped(x | y);
      case ReduceOp::kBitXor:
        return wrapped(x ^ y);
      case ReduceOp::kPremulSum:
        break;
    }
  } else {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAverage:
      case ReduceOp::kPremulSum:
        return a + b;
      case ReduceOp::kProduct:
        return a * b;
      default:
        break;
    }
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
    if (op == ReduceOp::kMin) return a < b ? a : b;
    if (op == ReduceOp::kMax) return a > b ? a : b;
  }
  return a;
}
inline Bool combined(Bool a, Bool b, ReduceOp op) {
  const bool x = a.value != 0, y = b.value != 0;
  switch (op) {
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return {x && y};
    case ReduceOp::kBitXor:
      return {x != y};
    default:
      return {x || y};
  }
}
inline Half combined(Half a, Half b, ReduceOp op) { return narrow(combined(widen(a), widen(b), op), Half{}); }
inline Bfloat16 combined(Bfloat16 a, Bfloat16 b, ReduceOp op) {
  return narrow(combined(widen(a), widen(b), op), Bfloat16{});
}

/// True if the bits are equal. All NaNs count as equal.
template <class T>
bool same(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) && std::isnan(b)) return true;
  } else if constexpr (kIsHalf<T>) {
    if (std::isnan(widen(a)) && std::isnan(widen(b))) return true;
  }
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

}  // namespace muster::test
