#pragma once

#include <ATen/core/Tensor.h>

#include "muster/group/group.h"

namespace muster {

/// The dtype of the same elements; kUnsupported for quantized and other types that are no plain elements.
Result<Dtype> dtype_of(c10::ScalarType type);

/// The dtype of a tensor that can be sent as it is or from a plain copy: on the CPU and dense. Else kUnsupported, with
/// what to do about it.
Result<Dtype> check_sendable(const at::Tensor& tensor);

/// The memory of a contiguous, dense CPU tensor, for the calls of Group. The view does not keep the tensor alive.
/// kUnsupported or kInvalidArgument say what is wrong with any other tensor.
Result<BufferView> view_of(const at::Tensor& tensor);

/// Whether view_of() would show the tensor's elements as they are, in order: dense, contiguous and not lazily
/// conjugated or negated.
bool is_plain(const at::Tensor& tensor);

}  // namespace muster
