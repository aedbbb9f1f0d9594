#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <string_view>

namespace muster::graph {

// For the definitions of operators: operators.cpp and chunked_matmul.cpp.

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// By the names of torch's functional collectives. Throws c10::ValueError for others.
c10d::ReduceOp reduce_op_of(std::string_view name);

/// An uninitialized tensor: `like` with `rows` in its first dimension.
at::Tensor new_rows(const at::Tensor& like, int64_t rows);

/// The result of an operator that is pending. A tensor may wait for several works.
at::Tensor pending(at::Tensor output, const WorkPtr& work);

}  // namespace muster::graph
