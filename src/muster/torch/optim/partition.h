#pragma once

#include <cstddef>
#include <vector>

#include "muster/base/error.h"

namespace muster::optim {

/// Which rank is to own each of the things of these sizes: the largest first, each to whoever has least (Graham's rule:
/// at most 4/3 of the best possible maximum). The same wherever it is computed. `loads`, by rank, counts what each has
/// from before and is brought up to date.
std::vector<Rank> partition(const std::vector<size_t>& sizes, std::vector<size_t>& loads);

}  // namespace muster::optim
