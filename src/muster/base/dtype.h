#pragma once

#include <cstddef>
#include <cstdint>

#include "muster/base/error.h"

namespace muster {

/// Element types: all that torch 2.15 has as dense elements. Sent on the wire: append only, never renumber.
enum class Dtype : uint8_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex32 = 8,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBfloat16 = 12,
  kFloat8E5m2 = 13,
  kFloat8E4m3fn = 14,
  kFloat8E5m2fnuz = 15,
  kFloat8E4m3fnuz = 16,
  kFloat8E8m0fnu = 17,
  kUint16 = 18,
  kUint32 = 19,
  kUint64 = 20,
  kFloat4E2m1fnX2 = 21,
  kBits8 = 22,   ///< an opaque byte: torch's int1 to int7, uint1 to uint7, bits1x8 to bits8
  kBits16 = 23,  ///< torch's bits16
  kBcomplex32 = 24,
};
inline constexpr int kDtypeCount = 25;

/// Indexed by Dtype.
inline constexpr uint8_t kDtypeBytes[kDtypeCount] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 2,
                                                     1, 1, 1, 1, 1, 2, 4, 8, 1, 1, 2,  4};
/// Bytes of one element.
constexpr size_t size_of(Dtype dtype) { return kDtypeBytes[static_cast<size_t>(dtype)]; }
/// torch's name without "torch.": "float32", "bfloat16", "float8_e4m3fn".
const char* name(Dtype dtype);

/// How elements are combined. Sent on the wire: append only.
enum class ReduceOp : uint8_t {
  kSum = 0,
  kAverage = 1,
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBitAnd = 5,
  kBitOr = 6,
  kBitXor = 7,
  kPremulSum = 8,  ///< a sum; each rank first multiplies its elements by its own factor
};
inline constexpr int kReduceOpCount = 9;

const char* name(ReduceOp op);

/// kUnsupported, with both names, if `op` cannot combine elements of `dtype`. Floating-point and complex types have no
/// bit operations, and complex types have no order. Only floating-point and complex types support kPremulSum. The
/// float8, float4, bits and bcomplex32 types can be sent but not reduced.
Result<> check_reducible(Dtype dtype, ReduceOp op);
/// The same as a bool.
bool reducible(Dtype dtype, ReduceOp op);

}  // namespace muster
