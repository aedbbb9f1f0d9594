#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "muster/group/group.h"

namespace muster {

/// A node of the autograd graph, as this version of torch holds it.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// The numbers, ascending, of the parameters whose gradient accumulators cannot be reached from the outputs. Ignores
/// outputs that need no gradient.
std::vector<size_t> find_unused(const std::vector<at::Tensor>& outputs, const std::vector<NodePtr>& accumulators);

/// Which parameters the current backward does not use at this rank, and how many ranks used each one in the last
/// backward that was reduced.
class UsedParameters {
 public:
  explicit UsedParameters(size_t count);

  /// Parameters that get no gradient in the next backward, ascending.
  void set_unused(std::vector<size_t> unused);
  const std::vector<size_t>& unused() const { return unused_; }
  bool all_unused(const std::vector<size_t>& parameters) const;
  /// True if two backwards had different unused parameters.
  bool has_changed() const { return has_changed_; }

  /// int32 by parameter: 1 if used here; once reduced, the number of ranks that used it.
  const at::Tensor& counts() const { return counts_; }
  void mark_used(size_t index) { counts_.mutable_data_ptr<int>()[index] = 1; }
  void clear_counts();
  void all_reduce_counts(Group& group);
  /// The counts are those of all ranks.
  bool reduced() const { return reduced_; }
  bool globally_unused(size_t index) const { return reduced_ && counts_.const_data_ptr<int>()[index] == 0; }
  void reset();

 private:
  at::Tensor counts_;
  bool reduced_ = false;
  std::vector<size_t> unused_;
  bool known_ = false;  ///< set_unused() was called
  bool has_changed_ = false;
};

}  // namespace muster
