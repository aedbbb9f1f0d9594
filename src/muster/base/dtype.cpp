#include "muster/base/dtype.h"

#include <fmt/format.h>

#include <array>

namespace muster {
namespace {

enum class Kind : uint8_t { kBool, kInteger, kFloat, kComplex, kOpaque };

struct Traits {
  const char* name;
  Kind kind;
};

// In the order of the enum.
constexpr Traits kTraits[kDtypeCount] = {
    {"uint8", Kind::kInteger},           {"int8", Kind::kInteger},           {"int16", Kind::kInteger},
    {"int32", Kind::kInteger},           {"int64", Kind::kInteger},          {"float16", Kind::kFloat},
    {"float32", Kind::kFloat},           {"float64", Kind::kFloat},          {"complex32", Kind::kComplex},
    {"complex64", Kind::kComplex},       {"complex128", Kind::kComplex},     {"bool", Kind::kBool},
    {"bfloat16", Kind::kFloat},          {"float8_e5m2", Kind::kOpaque},     {"float8_e4m3fn", Kind::kOpaque},
    {"float8_e5m2fnuz", Kind::kOpaque},  {"float8_e4m3fnuz", Kind::kOpaque}, {"float8_e8m0fnu", Kind::kOpaque},
    {"uint16", Kind::kInteger},          {"uint32", Kind::kInteger},         {"uint64", Kind::kInteger},
    {"float4_e2m1fn_x2", Kind::kOpaque}, {"bits8", Kind::kOpaque},           {"bits16", Kind::kOpaque},
};

const Traits& traits(Dtype dtype) { return kTraits[static_cast<size_t>(dtype)]; }

constexpr bool takes(Kind kind, ReduceOp op) {
  const bool bitwise = op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor;
  const bool ordered = op == ReduceOp::kMin || op == ReduceOp::kMax;
  switch (kind) {
    case Kind::kBool:
      return op != ReduceOp::kAverage && op != ReduceOp::kPremulSum;
    case Kind::kInteger:
      return op != ReduceOp::kPremulSum;
    case Kind::kFloat:
      return !bitwise;
    case Kind::kComplex:
      return !bitwise && !ordered;
    case Kind::kOpaque:
      return false;
  }
  return false;
}

// For each dtype, one bit for each operation that it supports. A table, because every call needs the answer several
// times.
constexpr std::array<uint16_t, kDtypeCount> kOpsOf = [] {
  std::array<uint16_t, kDtypeCount> ops{};
  for (int dtype = 0; dtype < kDtypeCount; ++dtype) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      ops[dtype] |= static_cast<uint16_t>(takes(kTraits[dtype].kind, static_cast<ReduceOp>(op)) ? 1 << op : 0);
    }
  }
  return ops;
}();

}  // namespace

const char* name(Dtype dtype) { return traits(dtype).name; }

const char* name(ReduceOp op) {
  static constexpr const char* kNames[kReduceOpCount] = {"sum",  "avg", "product", "min",       "max",
                                                         "band", "bor", "bxor",    "premul_sum"};
  return kNames[static_cast<size_t>(op)];
}

bool reducible(Dtype dtype, ReduceOp op) {
  return static_cast<int>(dtype) < kDtypeCount && static_cast<int>(op) < kReduceOpCount &&
         (kOpsOf[static_cast<size_t>(dtype)] >> static_cast<int>(op) & 1) != 0;
}

Result<> check_reducible(Dtype dtype, ReduceOp op) {
  if (reducible(dtype, op)) return {};
  if (static_cast<int>(dtype) >= kDtypeCount || static_cast<int>(op) >= kReduceOpCount) {
    return fail(ErrorCode::kInvalidArgument, "unknown dtype or reduce operation");
  }
  return fail(ErrorCode::kUnsupported, fmt::format("{} cannot be reduced with {}", name(dtype), name(op)));
}

}  // namespace muster
