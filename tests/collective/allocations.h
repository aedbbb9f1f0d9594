#pragma once

#include <cstddef>

namespace muster::test {

/// How often this program has called operator new so far.
size_t allocations();

}  // namespace muster::test
