#include "muster/base/dtype.h"

#include <fmt/format.h>

namespace muster {
namespace {

/// A set of reduce operations, one bit for each.
template <class... Ops>
constexpr uint16_t set_of(Ops... ops) {
  return static_cast<uint16_t>(((1 << static_cast<int>(ops)) | ...));
}
constexpr uint16_t kAllOps = (1 << kReduceOpCount) - 1;
constexpr uint16_t kOfBool = kAllOps & ~set_of(ReduceOp::kAverage, ReduceOp::kPremulSum);
constexpr uint16_t kOfInteger = kAllOps & ~set_of(ReduceOp::kPremulSum);
constexpr uint16_t kOfFloat = kAllOps & ~set_of(ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor);
constexpr uint16_t kOfComplex = kOfFloat & ~set_of(ReduceOp::kMin, ReduceOp::kMax);
constexpr uint16_t kNoOps = 0;

struct Traits {
  const char* name;
  uint16_t ops;  ///< the operations that it supports
};

// In the order of the enum.
constexpr Traits kTraits[kDtypeCount] = {
    {"uint8", kOfInteger},       {"int8", kOfInteger},         {"int16", kOfInteger},      {"int32", kOfInteger},
    {"int64", kOfInteger},       {"float16", kOfFloat},        {"float32", kOfFloat},      {"float64", kOfFloat},
    {"complex32", kOfComplex},   {"complex64", kOfComplex},    {"complex128", kOfComplex}, {"bool", kOfBool},
    {"bfloat16", kOfFloat},      {"float8_e5m2", kNoOps},      {"float8_e4m3fn", kNoOps},  {"float8_e5m2fnuz", kNoOps},
    {"float8_e4m3fnuz", kNoOps}, {"float8_e8m0fnu", kNoOps},   {"uint16", kOfInteger},     {"uint32", kOfInteger},
    {"uint64", kOfInteger},      {"float4_e2m1fn_x2", kNoOps}, {"bits8", kNoOps},          {"bits16", kNoOps},
    {"bcomplex32", kNoOps},
};

const Traits& traits(Dtype dtype) { return kTraits[static_cast<size_t>(dtype)]; }

}  // namespace

const char* name(Dtype dtype) { return traits(dtype).name; }

const char* name(ReduceOp op) {
  static constexpr const char* kNames[kReduceOpCount] = {"sum",  "avg", "product", "min",       "max",
                                                         "band", "bor", "bxor",    "premul_sum"};
  return kNames[static_cast<size_t>(op)];
}

bool reducible(Dtype dtype, ReduceOp op) {
  return static_cast<int>(dtype) < kDtypeCount && static_cast<int>(op) < kReduceOpCount &&
         (traits(dtype).ops & set_of(op)) != 0;
}

Result<> check_reducible(Dtype dtype, ReduceOp op) {
  if (reducible(dtype, op)) return {};
  if (static_cast<int>(dtype) >= kDtypeCount || static_cast<int>(op) >= kReduceOpCount) {
    return fail(ErrorCode::kInvalidArgument, "unknown dtype or reduce operation");
  }
  return fail(ErrorCode::kUnsupported, fmt::format("{} cannot be reduced with {}", name(dtype), name(op)));
}

}  // namespace muster
