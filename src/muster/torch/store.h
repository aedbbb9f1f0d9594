#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "muster/store/store.h"

namespace muster {

/// torch's view of a muster store: torch.distributed accepts it wherever it takes a store. Waits use c10d's timeout
/// (setTimeout). A wait that ends by it throws c10::DistStoreError, a lost server c10::DistNetworkError.
c10::intrusive_ptr<c10d::Store> c10d_over_store(std::unique_ptr<Store> store);

/// muster's view of any store that torch made, so that a Group can form over it. Failures come back as values; a wait
/// that ran into its deadline is kTimeout. Operations that the store below lacks are kUnsupported.
/// c10d bounds only waits: against a server that hangs, its other operations may outlast the deadline.
std::unique_ptr<Store> store_over_c10d(c10::intrusive_ptr<c10d::Store> store);

}  // namespace muster
