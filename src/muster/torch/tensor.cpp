#include "muster/torch/tensor.h"

#include <c10/util/StringUtil.h>

#include <array>
#include <optional>
#include <utility>

#include "muster/torch/c10d/torch_versions.h"

namespace muster {
namespace {

using c10::ScalarType;

constexpr std::pair<ScalarType, Dtype> kDtypes[] = {
    {ScalarType::Byte, Dtype::kUint8},
    {ScalarType::Char, Dtype::kInt8},
    {ScalarType::Short, Dtype::kInt16},
    {ScalarType::Int, Dtype::kInt32},
    {ScalarType::Long, Dtype::kInt64},
    {ScalarType::Half, Dtype::kFloat16},
    {ScalarType::Float, Dtype::kFloat32},
    {ScalarType::Double, Dtype::kFloat64},
    {ScalarType::ComplexHalf, Dtype::kComplex32},
    {ScalarType::ComplexFloat, Dtype::kComplex64},
    {ScalarType::ComplexDouble, Dtype::kComplex128},
    {ScalarType::Bool, Dtype::kBool},
    {ScalarType::BFloat16, Dtype::kBfloat16},
    {ScalarType::Float8_e5m2, Dtype::kFloat8E5m2},
    {ScalarType::Float8_e4m3fn, Dtype::kFloat8E4m3fn},
    {ScalarType::Float8_e5m2fnuz, Dtype::kFloat8E5m2fnuz},
    {ScalarType::Float8_e4m3fnuz, Dtype::kFloat8E4m3fnuz},
    {ScalarType::Float8_e8m0fnu, Dtype::kFloat8E8m0fnu},
    {ScalarType::UInt16, Dtype::kUint16},
    {ScalarType::UInt32, Dtype::kUint32},
    {ScalarType::UInt64, Dtype::kUint64},
    {ScalarType::Float4_e2m1fn_x2, Dtype::kFloat4E2m1fnX2},
    {ScalarType::Bits16, Dtype::kBits16},
#if MUSTER_TORCH_HAS_BCOMPLEX32
    {ScalarType::BComplex32, Dtype::kBcomplex32},
#endif
};
/// Types without arithmetic in torch. One element, or several, fill a byte.
constexpr ScalarType kByteTypes[] = {ScalarType::UInt1,   ScalarType::UInt2, ScalarType::UInt3,   ScalarType::UInt4,
                                     ScalarType::UInt5,   ScalarType::UInt6, ScalarType::UInt7,   ScalarType::Int1,
                                     ScalarType::Int2,    ScalarType::Int3,  ScalarType::Int4,    ScalarType::Int5,
                                     ScalarType::Int6,    ScalarType::Int7,  ScalarType::Bits1x8, ScalarType::Bits2x4,
                                     ScalarType::Bits4x2, ScalarType::Bits8};

/// Indexed by ScalarType, because every call looks up the dtype of its tensors.
constexpr auto kDtypeOf = [] {
  std::array<std::optional<Dtype>, static_cast<size_t>(ScalarType::NumOptions)> table{};
  for (const auto& [type, dtype] : kDtypes) table[static_cast<size_t>(type)] = dtype;
  for (const ScalarType type : kByteTypes) table[static_cast<size_t>(type)] = Dtype::kBits8;
  return table;
}();

}  // namespace

Result<Dtype> dtype_of(c10::ScalarType type) {
  const auto index = static_cast<size_t>(type);
  if (index < kDtypeOf.size() && kDtypeOf[index]) return *kDtypeOf[index];
  return fail(ErrorCode::kUnsupported, c10::str("tensors of type ", type, " cannot be sent; convert it first"));
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

Result<Dtype> check_dense(const at::Tensor& tensor) {
  if (!tensor.defined()) return fail(ErrorCode::kInvalidArgument, "the tensor is undefined");
  if (tensor.device().is_meta()) return fail(ErrorCode::kUnsupported, "a tensor on meta has no data");
  if (tensor.layout() != c10::kStrided) {
    return fail(ErrorCode::kUnsupported,
                c10::str("muster sends dense tensors; this one is ", tensor.layout(), ": use .to_dense() first"));
  }
  return dtype_of(tensor.scalar_type());
}

Result<Dtype> check_sendable(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().is_cpu()) return check_dense(tensor);
  return fail(ErrorCode::kUnsupported,
              c10::str("takes tensors on the CPU; this one is on ", tensor.device(), ": move it with .cpu() first"));
}

Result<BufferView> view_of(const at::Tensor& tensor) {
  MUSTER_ASSIGN(const Dtype dtype, check_sendable(tensor));
  if (!is_plain(tensor)) return fail(ErrorCode::kInvalidArgument, "the tensor is not contiguous");
  return BufferView(tensor.data_ptr(), static_cast<size_t>(tensor.numel()), dtype);
}

}  // namespace muster
