#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "muster/base/dtype.h"
#include "muster/torch/exception.h"

// Argument checks of c10d calls. They run before the call is submitted, and throw c10::ValueError "title: reason".
namespace muster {

template <class... Parts>
void check_argument(bool condition, const char* title, const Parts&... message) {
  if (!condition) throw_error({ErrorCode::kInvalidArgument, c10::str(title, ": ", message...)});
}

/// A reduce operation of torch in muster's terms. PREMUL_SUM first multiplies by `factor`.
struct Reduction {
  ReduceOp op;
  double factor;
};
Reduction reduction_of(const c10d::ReduceOp& op);

/// Requires at least one tensor, all of the same dtype and shape.
void check_alike(const std::vector<at::Tensor>& tensors, const char* title);
/// Requires exactly one tensor, or one list of tensors, and returns it.
const at::Tensor& single_tensor(const std::vector<at::Tensor>& tensors, const char* title);
const std::vector<at::Tensor>& single_list(const std::vector<std::vector<at::Tensor>>& lists, const char* title);
/// Requires a rank below `size`, and returns it.
Rank check_rank(int64_t rank, int size, const char* title, const char* role = "root");

/// Requires one tensor for each rank, all of `like`'s dtype, and dense.
void check_list(const std::vector<at::Tensor>& list, const at::Tensor& like, int size, const char* title,
                const char* what);
/// Requires `whole` to have `size` times the elements of `part`, and its dtype.
void check_divisible(const at::Tensor& whole, const at::Tensor& part, int size, const char* title);

/// The number of elements of each tensor.
std::vector<size_t> counts_of(const std::vector<at::Tensor>& tensors);
bool all_equal(const std::vector<size_t>& counts);
/// Groups tensors by dtype, in the order in which the dtypes first occur. Throws for a tensor that cannot be sent.
std::vector<std::vector<at::Tensor>> by_dtype(const std::vector<at::Tensor>& tensors);

}  // namespace muster
