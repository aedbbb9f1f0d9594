#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "group/ranks.h"
#include "muster/torch/backend.h"
#include "muster/torch/store.h"

namespace muster::test {

/// Runs ranks as threads, each with a c10d backend of its own. With `together`, no rank leaves before all are done.
inline void run_backends(int size, const std::function<void(ProcessGroupMuster&)>& body, bool together = true) {
  const auto store = memory_store();
  run_ranks(size, [&](Rank rank) {
    auto handle = store->clone();
    ASSERT_TRUE(handle) << handle.error().to_string();
    const auto backend = ProcessGroupMuster::create(c10d_over_store(std::move(*handle)), {rank, size, "test", 0},
                                                    std::chrono::minutes(1));
    body(*backend);
    if (together) backend->barrier(c10d::BarrierOptions())->wait();
  });
}

}  // namespace muster::test
