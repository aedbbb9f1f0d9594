// Calls of several threads on one group: they run inline if the group is idle, else they are queued. Hooks see all of
// them.
#include <atomic>
#include <thread>

#include "group/ranks.h"

namespace muster {
namespace {

constexpr int kCallers = 3;
constexpr int kCalls = 3000;
constexpr int kQueued = 400;
constexpr int kAll = kCallers * kCalls + kQueued;

/// Calls barriers from several threads. Barriers all match each other, so the order of the threads does not matter.
void call_from_several_threads(Group& group) {
  std::atomic<int> done = 0;
  std::vector<std::thread> threads;
  for (int caller = 0; caller < kCallers; ++caller) {
    threads.emplace_back([&] {
      for (int i = 0; i < kCalls; ++i) done += group.barrier().result() ? 1 : 0;
    });
  }
  threads.emplace_back([&] {
    for (int i = 0; i < kQueued; ++i) {
      group.barrier({.async = true}).on_done([&](const Result<>& result) { done += result ? 1 : 0; });
      if (i % 16 != 0) continue;
      EXPECT_TRUE(group.wait_for_pending(Deadline::after(std::chrono::seconds(60))));
    }
  });
  for (std::thread& thread : threads) thread.join();
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  EXPECT_TRUE(group.wait_for_pending(deadline));
  while (done < kAll && !deadline.passed()) std::this_thread::yield();  // the last callback may still be running
  EXPECT_EQ(done, kAll);
}

TEST(GroupCallOrder, UsesEachSequenceNumberOnce) {
  test::run_group(2, "shm", [](Group& group) {
    call_from_several_threads(group);
    EXPECT_EQ(group.sequence(), kAll);
  });
}

TEST(GroupCallOrder, CallsChangingHooksInOrder) {
  test::run_group(2, "shm", [](Group& group) {
    std::atomic<uint64_t> last = 0, hook_calls = 0;
    std::atomic<bool> in_order = true, over = false;
    std::thread changer([&] {
      while (!over) {
        group.on_completion([&](const Finished& finished) {
          if (last.exchange(finished.call.sequence) >= finished.call.sequence) in_order = false;
          if (finished.submitted > finished.started || finished.started > finished.ended) in_order = false;
          ++hook_calls;
        });
        EXPECT_TRUE(group.wait_for_pending(Deadline::after(std::chrono::seconds(60))));
        group.on_completion(nullptr);
      }
    });
    call_from_several_threads(group);
    over = true;
    changer.join();
    EXPECT_TRUE(in_order);
    EXPECT_TRUE(group.wait_for_pending(Deadline::after(std::chrono::seconds(60))));
    group.on_completion([&](const Finished&) { ++hook_calls; });
    const uint64_t before = hook_calls;
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(group.barrier().result());
    EXPECT_TRUE(group.wait_for_pending(Deadline::after(std::chrono::seconds(60))));
    EXPECT_EQ(hook_calls, before + 10);
    group.on_completion(nullptr);
  });
}

}  // namespace
}  // namespace muster
