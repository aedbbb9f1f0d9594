#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "muster/group/group.h"

namespace muster::test {

/// Runs `body(rank)` for each rank on its own thread, and waits for all threads. An exception fails the test.
inline void run_ranks(int size, const std::function<void(Rank)>& body) {
  const auto run = [&body](Rank rank) {
    try {
      body(rank);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
    }
  };
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  for (auto& thread : threads) thread.join();
}

/// `transports`: as in GroupOptions, or "striped" for TCP links of three connections.
inline GroupOptions options_for(const std::string& transports, Duration timeout = std::chrono::seconds(60)) {
  GroupOptions options;
  options.timeout = timeout;
  options.transports = transports == "striped" ? "tcp" : transports;
  options.tcp_streams = transports == "striped" ? 3 : 1;
  return options;
}

/// Runs ranks as threads that form a group over an in-memory store. Each thread gets its formed group.
inline void run_group(int size, const std::function<GroupOptions(Rank)>& options,
                      const std::function<void(Group&)>& body) {
  const auto store = memory_store();
  run_ranks(size, [&](Rank rank) {
    const auto handle = store->clone();
    ASSERT_TRUE(handle) << handle.error().to_string();
    const auto group = Group::form(**handle, {rank, size, "test", 0}, options(rank));
    ASSERT_TRUE(group) << group.error().to_string();
    body(**group);
    // No rank leaves while another still works.
    const auto end = (*group)->barrier().result();
    EXPECT_TRUE(end || !(*group)->status()) << end.error().to_string();
  });
}

inline void run_group(int size, const GroupOptions& options, const std::function<void(Group&)>& body) {
  run_group(
      size, [&options](Rank) { return options; }, body);
}

inline void run_group(int size, const std::string& transports, const std::function<void(Group&)>& body,
                      Duration timeout = std::chrono::seconds(60)) {
  run_group(size, options_for(transports, timeout), body);
}

}  // namespace muster::test
