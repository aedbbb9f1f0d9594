#pragma once

#include <ATen/core/Tensor.h>

#include "muster/group/group.h"

namespace muster {

/// The Dtype of a torch dtype. kUnsupported for quantized types and others without plain elements.
Result<Dtype> dtype_of(c10::ScalarType type);

/// The dtype of a dense tensor on any device. kUnsupported for other tensors; the error says how to convert them.
Result<Dtype> check_dense(const at::Tensor& tensor);

/// The same for a tensor on the CPU, which can be sent as it is or from a plain copy.
Result<Dtype> check_sendable(const at::Tensor& tensor);

/// The memory of a contiguous, dense CPU tensor, for the calls of Group. The view does not keep the tensor alive. Fails
/// with kUnsupported or kInvalidArgument for other tensors.
Result<BufferView> view_of(const at::Tensor& tensor);

/// True if the memory holds the tensor's elements in order: dense, contiguous, not lazily conjugated or negated.
bool is_plain(const at::Tensor& tensor);

}  // namespace muster
