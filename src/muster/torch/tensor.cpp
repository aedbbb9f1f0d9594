#include "muster/torch/tensor.h"

#include <c10/util/StringUtil.h>

namespace muster {
namespace {

/// Types of which torch knows little but that an element, or several, fills a byte.
bool is_byte_of_bits(c10::ScalarType type) {
  using c10::ScalarType;
  switch (type) {
    case ScalarType::UInt1:
    case ScalarType::UInt2:
    case ScalarType::UInt3:
    case ScalarType::UInt4:
    case ScalarType::UInt5:
    case ScalarType::UInt6:
    case ScalarType::UInt7:
    case ScalarType::Int1:
    case ScalarType::Int2:
    case ScalarType::Int3:
    case ScalarType::Int4:
    case ScalarType::Int5:
    case ScalarType::Int6:
    case ScalarType::Int7:
    case ScalarType::Bits1x8:
    case ScalarType::Bits2x4:
    case ScalarType::Bits4x2:
    case ScalarType::Bits8:
      return true;
    default:
      return false;
  }
}

}  // namespace

Result<Dtype> dtype_of(c10::ScalarType type) {
  using c10::ScalarType;
  switch (type) {
    case ScalarType::Byte:
      return Dtype::kUint8;
    case ScalarType::Char:
      return Dtype::kInt8;
    case ScalarType::Short:
      return Dtype::kInt16;
    case ScalarType::Int:
      return Dtype::kInt32;
    case ScalarType::Long:
      return Dtype::kInt64;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Double:
      return Dtype::kFloat64;
    case ScalarType::ComplexHalf:
      return Dtype::kComplex32;
    case ScalarType::ComplexFloat:
      return Dtype::kComplex64;
    case ScalarType::ComplexDouble:
      return Dtype::kComplex128;
    case ScalarType::Bool:
      return Dtype::kBool;
    case ScalarType::BFloat16:
      return Dtype::kBfloat16;
    case ScalarType::Float8_e5m2:
      return Dtype::kFloat8E5m2;
    case ScalarType::Float8_e4m3fn:
      return Dtype::kFloat8E4m3fn;
    case ScalarType::Float8_e5m2fnuz:
      return Dtype::kFloat8E5m2fnuz;
    case ScalarType::Float8_e4m3fnuz:
      return Dtype::kFloat8E4m3fnuz;
    case ScalarType::Float8_e8m0fnu:
      return Dtype::kFloat8E8m0fnu;
    case ScalarType::UInt16:
      return Dtype::kUint16;
    case ScalarType::UInt32:
      return Dtype::kUint32;
    case ScalarType::UInt64:
      return Dtype::kUint64;
    case ScalarType::Float4_e2m1fn_x2:
      return Dtype::kFloat4E2m1fnX2;
    case ScalarType::Bits16:
      return Dtype::kBits16;
    default:
      break;
  }
  if (is_byte_of_bits(type)) return Dtype::kBits8;
  return fail(ErrorCode::kUnsupported, c10::str("tensors of type ", type, " cannot be sent; convert it first"));
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

Result<Dtype> check_sendable(const at::Tensor& tensor) {
  if (!tensor.defined()) return fail(ErrorCode::kInvalidArgument, "the tensor is undefined");
  if (!tensor.device().is_cpu()) {
    return fail(ErrorCode::kUnsupported,
                c10::str("muster sends CPU tensors; this one is on ", tensor.device(), ": move it with .cpu() first"));
  }
  if (tensor.layout() != c10::kStrided) {
    return fail(ErrorCode::kUnsupported,
                c10::str("muster sends dense tensors; this one is ", tensor.layout(), ": use .to_dense() first"));
  }
  return dtype_of(tensor.scalar_type());
}

Result<BufferView> view_of(const at::Tensor& tensor) {
  MUSTER_ASSIGN(const Dtype dtype, check_sendable(tensor));
  if (!is_plain(tensor)) return fail(ErrorCode::kInvalidArgument, "the tensor is not contiguous");
  return BufferView(tensor.data_ptr(), static_cast<size_t>(tensor.numel()), dtype);
}

}  // namespace muster
