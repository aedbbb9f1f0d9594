#pragma once

#include <cstddef>

namespace muster::test {

/// The number of calls of operator new in this program so far.
size_t allocations();

}  // namespace muster::test
