#pragma once

#include <cstdint>

#include "base/sanitized.h"

namespace muster::cost {

/// The number of calls of malloc and similar functions in this process so far, including `new`. Always zero if
/// MUSTER_SANITIZED is set.
uint64_t allocations();

}  // namespace muster::cost
