#include "muster/torch/c10d/arguments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "muster/torch/c10d/torch_versions.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

double factor_of(const c10d::ReduceOp& op) {
  const auto* premultiplied = dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
  check_argument(premultiplied != nullptr, "PREMUL_SUM", "has no factor; make it with _make_nccl_premul_sum()");
  const at::Tensor& factor = premultiplied->tensor_factor;
  return factor.defined() ? factor.item<double>() : premultiplied->double_factor;
}

}  // namespace

Reduction reduction_of(const c10d::ReduceOp& op) {
  using Op = c10d::ReduceOp;
  static constexpr std::pair<Op::RedOpType, ReduceOp> kOps[] = {
      {Op::SUM, ReduceOp::kSum},   {Op::AVG, ReduceOp::kAverage}, {Op::PRODUCT, ReduceOp::kProduct},
      {Op::MIN, ReduceOp::kMin},   {Op::MAX, ReduceOp::kMax},     {Op::BAND, ReduceOp::kBitAnd},
      {Op::BOR, ReduceOp::kBitOr}, {Op::BXOR, ReduceOp::kBitXor}, {Op::PREMUL_SUM, ReduceOp::kPremulSum}};
  for (const auto& [torch_op, ours] : kOps) {
    if (torch_op == op.op_) return {ours, ours == ReduceOp::kPremulSum ? factor_of(op) : 1};
  }
  throw_error({ErrorCode::kInvalidArgument, c10::str("reduce operation ", static_cast<int>(op.op_), " is unknown")});
}

void check_alike(const std::vector<at::Tensor>& tensors, const char* title) {
  check_argument(!tensors.empty(), title, "the list of tensors is empty");
  for (const at::Tensor& tensor : tensors) {
    value_or_throw(check_dense(tensor));
    check_argument(tensor.scalar_type() == tensors.front().scalar_type(), title,
                   "the tensors differ in dtype: ", tensors.front().scalar_type(), " and ", tensor.scalar_type());
    check_argument(tensor.sizes() == tensors.front().sizes(), title,
                   "the tensors of a rank differ in shape: ", tensors.front().sizes(), " and ", tensor.sizes());
  }
}

const at::Tensor& single_tensor(const std::vector<at::Tensor>& tensors, const char* title) {
  check_argument(tensors.size() == 1, title, "takes one tensor per rank, got ", tensors.size());
  return tensors.front();
}

const std::vector<at::Tensor>& single_list(const std::vector<std::vector<at::Tensor>>& lists, const char* title) {
  check_argument(lists.size() == 1, title, "takes one list of tensors per rank, got ", lists.size());
  return lists.front();
}

Rank check_rank(int64_t rank, int size, const char* title, const char* role) {
  check_argument(rank >= 0 && rank < size, title, role, ' ', rank, " is out of range for a group of ", size, " ranks");
  return static_cast<Rank>(rank);
}

void check_list(const std::vector<at::Tensor>& list, const at::Tensor& like, int size, const char* title,
                const char* what) {
  check_argument(static_cast<int>(list.size()) == size, title, "the ", what, " list has ", list.size(),
                 " tensors, but the group has ", size, " ranks");
  for (const at::Tensor& tensor : list) {
    value_or_throw(check_dense(tensor));
    check_argument(tensor.scalar_type() == like.scalar_type(), title,
                   "the tensors differ in dtype: ", tensor.scalar_type(), " in the ", what, " list, but ",
                   like.scalar_type(), " elsewhere");
  }
}

void check_divisible(const at::Tensor& whole, const at::Tensor& part, int size, const char* title) {
  value_or_throw(check_dense(whole));
  value_or_throw(check_dense(part));
  check_argument(whole.scalar_type() == part.scalar_type(), title,
                 "input and output differ in dtype: ", whole.scalar_type(), " and ", part.scalar_type());
  check_argument(whole.numel() == part.numel() * size, title, size, " ranks with ", part.numel(),
                 " elements each need ", part.numel() * size, ", not ", whole.numel());
}

std::vector<size_t> counts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<size_t> counts;
  counts.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) counts.push_back(static_cast<size_t>(tensor.numel()));
  return counts;
}

bool all_equal(const std::vector<size_t>& counts) {
  return std::all_of(counts.begin(), counts.end(), [&](size_t count) { return count == counts.front(); });
}

std::vector<std::vector<at::Tensor>> by_dtype(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> lists;
  for (const at::Tensor& tensor : tensors) {
    value_or_throw(check_dense(tensor));
    auto list = std::find_if(lists.begin(), lists.end(),
                             [&](const auto& each) { return each.front().scalar_type() == tensor.scalar_type(); });
    if (list == lists.end()) list = lists.emplace(lists.end());
    list->push_back(tensor);
  }
  return lists;
}

}  // namespace muster
