#include "muster/base/dtype.h"

#include <fmt/format.h>

namespace muster {
namespace {

enum class Kind : uint8_t { kBool, kInteger, kFloat, kComplex, kOpaque };

struct Traits {
  const char* name;
  uint8_t size;
  Kind kind;
};

// In the order of the enum.
constexpr Traits kTraits[kDtypeCount] = {
    {"uint8", 1, Kind::kInteger},           {"int8", 1, Kind::kInteger},           {"int16", 2, Kind::kInteger},
    {"int32", 4, Kind::kInteger},           {"int64", 8, Kind::kInteger},          {"float16", 2, Kind::kFloat},
    {"float32", 4, Kind::kFloat},           {"float64", 8, Kind::kFloat},          {"complex32", 4, Kind::kComplex},
    {"complex64", 8, Kind::kComplex},       {"complex128", 16, Kind::kComplex},    {"bool", 1, Kind::kBool},
    {"bfloat16", 2, Kind::kFloat},          {"float8_e5m2", 1, Kind::kOpaque},     {"float8_e4m3fn", 1, Kind::kOpaque},
    {"float8_e5m2fnuz", 1, Kind::kOpaque},  {"float8_e4m3fnuz", 1, Kind::kOpaque}, {"float8_e8m0fnu", 1, Kind::kOpaque},
    {"uint16", 2, Kind::kInteger},          {"uint32", 4, Kind::kInteger},         {"uint64", 8, Kind::kInteger},
    {"float4_e2m1fn_x2", 1, Kind::kOpaque},
};

const Traits& traits(Dtype dtype) { return kTraits[static_cast<size_t>(dtype)]; }

bool reducible(Kind kind, ReduceOp op) {
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

}  // namespace

size_t size_of(Dtype dtype) { return traits(dtype).size; }

const char* name(Dtype dtype) { return traits(dtype).name; }

const char* name(ReduceOp op) {
  static constexpr const char* kNames[kReduceOpCount] = {"sum",  "avg", "product", "min",       "max",
                                                         "band", "bor", "bxor",    "premul_sum"};
  return kNames[static_cast<size_t>(op)];
}

Result<> check_reducible(Dtype dtype, ReduceOp op) {
  if (static_cast<int>(dtype) >= kDtypeCount || static_cast<int>(op) >= kReduceOpCount) {
    return fail(ErrorCode::kInvalidArgument, "unknown dtype or reduce operation");
  }
  if (reducible(traits(dtype).kind, op)) return {};
  return fail(ErrorCode::kUnsupported, fmt::format("{} cannot be reduced with {}", name(dtype), name(op)));
}

}  // namespace muster
