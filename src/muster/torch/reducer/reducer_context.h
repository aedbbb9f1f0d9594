#pragma once

#include <memory>
#include <string>
#include <vector>

#include "muster/torch/reducer/reducer.h"

namespace muster {

/// What all parts of a Reducer read. Only Reducer::Impl changes it, between backwards.
struct ReducerContext {
  std::shared_ptr<Group> group;
  std::vector<at::Tensor> parameters;
  ReducerOptions options;

  Rank rank() const { return group->membership().rank; }
  int size() const { return group->membership().size; }
  bool is_sparse(size_t index) const { return !options.sparse.empty() && options.sparse[index]; }
  /// For messages: "3 (body.weight)".
  std::string name_of(size_t index) const;
};

}  // namespace muster
