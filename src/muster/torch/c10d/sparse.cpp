// Sparse all-reduce: the ranks have different elements, so each rank gathers them all and adds them up in rank order.
#include "muster/torch/c10d/sparse.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <numeric>
#include <utility>

#include "muster/torch/c10d/arguments.h"
#include "muster/torch/tensor.h"

namespace muster {
namespace {

constexpr const char* kSparseTitle = "all_reduce of sparse tensors";

/// The number of elements, then the values that must be equal at all ranks: sparse dimensions, dtype, number of
/// dimensions, shape.
std::vector<int64_t> describe(const at::Tensor& tensor) {
  constexpr size_t kMaxDimensions = 16;
  check_argument(static_cast<size_t>(tensor.dim()) <= kMaxDimensions, kSparseTitle, "at most ", kMaxDimensions,
                 " dimensions, got ", tensor.dim());
  std::vector<int64_t> words{tensor._nnz(), tensor.sparse_dim(), static_cast<int64_t>(tensor.scalar_type()),
                             tensor.dim()};
  words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
  words.resize(4 + kMaxDimensions);
  return words;
}

/// The number of elements at each rank. If a shape or dtype differs, throws an error that names the rank.
std::vector<size_t> exchange_counts(Group& group, const at::Tensor& tensor, const CallOptions& options) {
  std::vector<int64_t> mine = describe(tensor);
  const size_t words = mine.size();
  const GroupSpec& self = group.membership();
  std::vector<int64_t> all(words * self.size);
  value_or_throw(
      group.all_gather({mine.data(), words, Dtype::kInt64}, {all.data(), all.size(), Dtype::kInt64}, options).wait());
  std::vector<size_t> counts;
  for (Rank rank = 0; rank < self.size; ++rank) {
    const auto theirs = all.begin() + static_cast<ptrdiff_t>(rank * words);
    if (!std::equal(mine.begin() + 1, mine.end(), theirs + 1)) {
      throw_error({ErrorCode::kMismatch,
                   c10::str(kSparseTitle, ": rank ", rank, " has a tensor of another shape or dtype than rank ",
                            self.rank, ", whose shape is ", tensor.sizes()),
                   rank});
    }
    counts.push_back(static_cast<size_t>(*theirs));
  }
  return counts;
}

/// Concatenates the ranks' tensors along the first dimension; rank r has counts[r] rows.
at::Tensor gather_rows(Group& group, const at::Tensor& rows, const std::vector<size_t>& counts,
                       const CallOptions& options, uint64_t* sequence = nullptr) {
  const at::Tensor input = rows.contiguous();
  std::vector<int64_t> shape = input.sizes().vec();
  shape.front() = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  at::Tensor output = at::empty(shape, input.options());
  size_t row = 1;
  for (size_t i = 1; i < shape.size(); ++i) row *= static_cast<size_t>(shape[i]);
  std::vector<size_t> elements;
  for (const size_t count : counts) elements.push_back(count * row);
  const Work work =
      group.all_gather(value_or_throw(view_of(input)), value_or_throw(view_of(output)), options, std::move(elements));
  value_or_throw(work.wait());
  if (sequence != nullptr) *sequence = work.sequence();
  return output;
}

}  // namespace

at::Tensor sum_sparse(Group& group, const at::Tensor& tensor, const CallOptions& options, uint64_t* sequence) {
  const at::NoGradGuard no_grad;
  const at::Tensor mine = tensor.coalesce();
  const std::vector<size_t> counts = exchange_counts(group, mine, options);
  const at::Tensor indices = gather_rows(group, mine._indices().t(), counts, options).t();
  const at::Tensor values = gather_rows(group, mine._values(), counts, options, sequence);
  return at::sparse_coo_tensor(indices, values, tensor.sizes()).coalesce();
}

at::Tensor empty_sparse_like(const at::Tensor& dense) {
  return at::_sparse_coo_tensor_with_dims(1, dense.dim() - 1, dense.sizes(), dense.options().layout(c10::kSparse));
}

}  // namespace muster
