#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "muster/torch/c10d/work.h"
#include "muster/torch/exception.h"
#include "muster/torch/tensor.h"

namespace muster {

/// Records which parameters the current backward does not use at this rank, and how many ranks used each parameter in
/// the last backward that was reduced.
class UsedParameters {
 public:
  explicit UsedParameters(size_t count) : counts_(at::zeros({static_cast<int64_t>(count)}, at::kInt)) {}

  /// Parameters that get no gradient in the next backward, ascending.
  void set_unused(std::vector<size_t> unused) {
    has_changed_ = has_changed_ || (std::exchange(known_, true) && unused != unused_);
    unused_ = std::move(unused);
  }
  const std::vector<size_t>& unused() const { return unused_; }
  bool all_unused(const std::vector<size_t>& parameters) const {
    return std::all_of(parameters.begin(), parameters.end(),
                       [this](size_t index) { return std::binary_search(unused_.begin(), unused_.end(), index); });
  }
  /// True if two backwards had different unused parameters.
  bool has_changed() const { return has_changed_; }

  /// int32 by parameter: 1 if used at this rank; once reduced, the number of ranks that used it.
  const at::Tensor& counts() const { return counts_; }
  void mark_used(size_t index) { counts_.mutable_data_ptr<int>()[index] = 1; }
  void clear_counts() {
    counts_.zero_();
    reduced_ = false;
  }
  void all_reduce_counts(Group& group) {
    const ProfilerEvent event("muster:all_reduce", counts_);
    value_or_throw(group.all_reduce(value_or_throw(view_of(counts_)), ReduceOp::kSum).wait());
    reduced_ = true;
  }
  /// True if the counts are those of all ranks.
  bool reduced() const { return reduced_; }
  bool globally_unused(size_t index) const { return reduced_ && counts_.const_data_ptr<int>()[index] == 0; }

  void reset() {
    clear_counts();
    unused_.clear();
    known_ = has_changed_ = false;
  }

 private:
  at::Tensor counts_;
  bool reduced_ = false;
  std::vector<size_t> unused_;
  bool known_ = false;  ///< set_unused() was called
  bool has_changed_ = false;
};

}  // namespace muster
