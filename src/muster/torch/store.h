#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "muster/store/store.h"

namespace muster {

/// Adapts a muster store to c10d's interface. Waits use c10d's timeout (setTimeout). A wait that times out throws
/// c10::DistStoreError, a lost server c10::DistNetworkError.
c10::intrusive_ptr<c10d::Store> c10d_over_store(std::unique_ptr<Store> store);

/// Adapts a c10d store to muster's interface, so that a Group can form over it. Failures are returned as values:
/// kTimeout for a wait that reached its deadline, kUnsupported for operations that the c10d store lacks. c10d bounds
/// only waits: if a server hangs, other operations may exceed the deadline.
std::unique_ptr<Store> store_over_c10d(c10::intrusive_ptr<c10d::Store> store);

}  // namespace muster
