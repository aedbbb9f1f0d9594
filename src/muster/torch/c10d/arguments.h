#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "muster/base/dtype.h"
#include "muster/torch/exception.h"

// What the calls of c10d check before any rank has begun: errors are c10::ValueError "title: what is wrong".
namespace muster {

template <class... Parts>
void check_argument(bool condition, const char* title, const Parts&... message) {
  if (!condition) throw_error({ErrorCode::kInvalidArgument, c10::str(title, ": ", message...)});
}

/// How torch's operation combines elements, and by what they are multiplied first.
struct Reduction {
  ReduceOp op;
  double factor;
};
Reduction reduction_of(const c10d::ReduceOp& op);

/// That there are tensors, and all are alike in dtype and shape: what a rank gives that has several.
void check_alike(const std::vector<at::Tensor>& tensors, const char* title);
/// The only tensor of a list that c10d makes of one.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* title);
const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* title);
/// `root` as one of the group's ranks.
Rank check_rank(int64_t root, int size, const char* title, const char* what = "root");

/// That the list has one tensor for each rank, all of `like`'s dtype, on the CPU and dense.
void check_list(const std::vector<at::Tensor>& list, const at::Tensor& like, int size, const char* title,
                const char* what);
/// That `whole` is `size` times `part`, and of its dtype.
void check_divisible(const at::Tensor& whole, const at::Tensor& part, int size, const char* title);

/// Elements of each tensor.
std::vector<size_t> counts_of(const std::vector<at::Tensor>& tensors);
bool all_equal(const std::vector<size_t>& counts);
/// The tensors of each dtype, in the order in which the dtypes first occur. Throws for one that cannot be sent.
std::vector<std::vector<at::Tensor>> by_dtype(const std::vector<at::Tensor>& tensors);

}  // namespace muster
