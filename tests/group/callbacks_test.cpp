// Completion callbacks that submit other operations of the same group and wait for them.
#include <future>
#include <latch>

#include "group/ranks.h"

namespace muster {
namespace {

TEST(GroupCallbacks, MayWaitForAnotherOperationOfTheirGroup) {
  test::run_group(2, "shm,unix,tcp", [](Group& group) {
    int64_t first = 1, second = 10, third = 100;
    std::promise<Result<>> nested;
    const Work work = group.all_reduce({&first, 1, Dtype::kInt64}, ReduceOp::kSum, {.async = true});
    work.on_done([&](const Result<>& result) {
      ASSERT_TRUE(result);
      const Work inner = group.all_reduce({&second, 1, Dtype::kInt64}, ReduceOp::kSum, {.async = true});
      ASSERT_TRUE(inner.wait());
      nested.set_value(group.all_reduce({&third, 1, Dtype::kInt64}, ReduceOp::kSum).result());
    });
    ASSERT_TRUE(nested.get_future().get());
    EXPECT_EQ(first, 2);
    EXPECT_EQ(second, 20);
    EXPECT_EQ(third, 200);
  });
}

TEST(GroupCallbacks, MayWaitForEarlierQueuedOperations) {
  test::run_group(2, "shm,unix,tcp", [](Group& group) {
    std::vector<std::vector<float>> data(8, std::vector<float>(200'000, 1.0f));
    std::vector<Work> works;
    for (auto& each : data) {
      works.push_back(group.all_reduce({each.data(), each.size(), Dtype::kFloat32}, ReduceOp::kSum, {.async = true}));
    }
    std::promise<Result<>> last;
    works[0].on_done([&](const Result<>&) { last.set_value(works[7].wait()); });
    ASSERT_TRUE(last.get_future().get());
    EXPECT_EQ(data[7][0], 2.0f);
  });
}

/// While a progress thread runs callbacks, another one must take its place, also after the destructor has begun to join
/// them.
TEST(GroupCallbacks, MayWaitWhileTheirGroupIsDestroyed) {
  const auto store = memory_store();
  std::latch destroyed(1);
  test::run_ranks(2, [&](Rank rank) {
    auto group = Group::form(*store, {rank, 2, "test", 0}, test::options_for("shm"));
    ASSERT_TRUE(group) << group.error().to_string();
    if (rank == 1) return destroyed.wait();  // so neither barrier succeeds, and the shutdown waits for an answer
    const CallOptions options{.timeout = std::chrono::seconds(60), .async = true};
    const Work first = (*group)->barrier(options), second = (*group)->barrier(options);
    Result<> queued, submitted;
    first.on_done([&, owner = group->get()](const Result<>&) {
      queued = second.wait();
      submitted = owner->barrier(options).wait();
    });
    // This also limits the wait for pending operations.
    ASSERT_TRUE((*group)->set_timeout(std::chrono::milliseconds(1)));
    group->reset();
    EXPECT_FALSE(first.result());
    EXPECT_FALSE(queued);
    EXPECT_FALSE(submitted);
    destroyed.count_down();
  });
}

TEST(GroupCallbacks, AreCalledAtOnceWhenTheWorkIsDone) {
  test::run_group(1, "shm", [](Group& group) {
    int calls = 0;
    group.barrier().on_done([&](const Result<>& result) { calls += result ? 1 : 0; });
    EXPECT_EQ(calls, 1);
  });
}

}  // namespace
}  // namespace muster
