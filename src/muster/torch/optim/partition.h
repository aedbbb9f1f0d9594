#pragma once

#include <cstddef>
#include <vector>

#include "muster/base/error.h"

namespace muster::optim {

/// Assigns items of these sizes to ranks: the largest first, each to the rank with the smallest load (Graham's rule: at
/// most 4/3 of the best possible maximum). Returns the owner of each item, the same at all ranks. `loads` has the
/// current load of each rank, and is updated.
std::vector<Rank> partition(const std::vector<size_t>& sizes, std::vector<size_t>& loads);

}  // namespace muster::optim
