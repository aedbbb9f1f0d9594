// Groups that are formed from groups, completion hooks, pending operations, and the monitored barrier.
#include <latch>
#include <mutex>
#include <set>

#include "group/ranks.h"

namespace muster {
namespace {

using test::options_for;
using test::run_ranks;

/// Runs ranks as threads that form a group over one store. `body` gets the group and the store.
void run_with_store(int size, const std::function<void(Group&, Store&)>& body) {
  const auto store = memory_store();
  run_ranks(size, [&](Rank rank) {
    const auto handle = store->clone();
    const auto group = Group::form(**handle, {rank, size, "parent", 0}, options_for("shm,unix,tcp"));
    ASSERT_TRUE(group) << group.error().to_string();
    body(**group, **handle);
  });
}

int64_t sum_of(Group& group, int64_t mine) {
  const auto result = group.all_reduce({&mine, 1, Dtype::kInt64}, ReduceOp::kSum).result();
  EXPECT_TRUE(result) << result.error().to_string();
  return mine;
}

TEST(GroupSplit, MakesAGroupOfTheRanksNamedInTheirOrder) {
  run_with_store(4, [](Group& group, Store& store) {
    const Rank rank = group.membership().rank;
    const auto part = group.split(store, {3, 1}, "odd");
    ASSERT_TRUE(part) << part.error().to_string();
    ASSERT_EQ(*part != nullptr, rank % 2 == 1);
    if (!*part) return;
    EXPECT_EQ((*part)->membership().rank, rank == 3 ? 0 : 1);
    EXPECT_EQ((*part)->membership().size, 2);
    EXPECT_EQ(sum_of(**part, rank), 4);
  });
}

TEST(GroupSplit, MakesOneGroupForEachColor) {
  run_with_store(5, [](Group& group, Store& store) {
    const Rank rank = group.membership().rank;
    const auto part = group.split(store, rank == 4 ? -1 : rank % 2, -rank, "halves");
    ASSERT_TRUE(part) << part.error().to_string();
    ASSERT_EQ(*part == nullptr, rank == 4);
    if (!*part) return;
    EXPECT_EQ((*part)->membership().rank, rank >= 2 ? 0 : 1);  // the keys reverse the order
    EXPECT_EQ(sum_of(**part, rank), rank % 2 == 0 ? 2 : 4);
  });
}

TEST(GroupSplit, RefusesUnknownAndRepeatedRanks) {
  run_with_store(1, [](Group& group, Store& store) {
    EXPECT_EQ(group.split(store, {1}, "a").error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(group.split(store, {0, 0}, "b").error().code, ErrorCode::kInvalidArgument);
  });
}

TEST(GroupDuplicate, HasTheSameRanksAndNeedsNoStore) {
  for (const char* const transports : {"shm", "unix", "tcp"}) {
    for (const int size : {1, 3, 20}) {
      auto store = memory_store();
      std::vector<std::unique_ptr<Group>> groups(static_cast<size_t>(size));
      run_ranks(size, [&](Rank rank) {
        auto group = Group::form(*store, {rank, size, "test", 0}, options_for(transports));
        ASSERT_TRUE(group) << group.error().to_string();
        groups[static_cast<size_t>(rank)] = std::move(*group);
      });
      store.reset();
      run_ranks(size, [&](Rank rank) {
        Group& group = *groups[static_cast<size_t>(rank)];
        auto duplicate = group.duplicate("own");
        ASSERT_TRUE(duplicate) << duplicate.error().to_string();
        EXPECT_EQ((*duplicate)->membership().rank, rank);
        EXPECT_EQ((*duplicate)->transport(), group.transport());
        EXPECT_NE((*duplicate)->id(), group.id());
        group.leave();  // it may go first
        EXPECT_EQ(sum_of(**duplicate, rank), size * (size - 1) / 2);
      });
    }
  }
}

TEST(GroupDuplicate, FailsIfARankDoesNotTakePart) {
  run_with_store(3, [](Group& group, Store&) {
    if (group.membership().rank == 1) return;  // it leaves
    const auto duplicate = group.duplicate("own");
    ASSERT_FALSE(duplicate);
    EXPECT_EQ(duplicate.error().rank, 1) << duplicate.error().to_string();
  });
}

TEST(GroupMerge, MakesOneGroupOfTwo) {
  const auto store = memory_store();
  run_ranks(4, [&](Rank place) {
    const auto half = Group::form(*store, {place % 2, 2, place < 2 ? "left" : "right", 0}, options_for("shm"));
    ASSERT_TRUE(half);
    const auto whole = (*half)->merge(*store, {place, 4, "whole", 0});
    ASSERT_TRUE(whole) << whole.error().to_string();
    EXPECT_EQ(sum_of(**whole, place), 6);
  });
}

TEST(GroupShrink, ContinuesWithoutTheFailedRank) {
  run_with_store(4, [](Group& group, Store& store) {
    const Rank rank = group.membership().rank;
    ASSERT_TRUE(group.barrier().result());
    if (rank == 1) return;  // rank 1 leaves
    EXPECT_FALSE(group.barrier().result());
    const auto rest = group.shrink(store, {1}, false);
    ASSERT_TRUE(rest) << rest.error().to_string();
    EXPECT_EQ((*rest)->membership().size, 3);
    EXPECT_EQ((*rest)->membership().rank, rank == 0 ? 0 : rank - 1);
    EXPECT_EQ(sum_of(**rest, rank), 5);
    // Shrinks the shrunk group once more.
    if (rank == 0) return;
    const auto fewer = (*rest)->shrink(store, {0}, true);
    ASSERT_TRUE(fewer) << fewer.error().to_string();
    EXPECT_EQ(sum_of(**fewer, rank), 5);
    EXPECT_FALSE((*rest)->status());
  });
}

TEST(GroupShrink, EndsPendingOperationsIfRequested) {
  run_with_store(3, [](Group& group, Store& store) {
    ASSERT_TRUE(store.barrier("formed", 3, Deadline::after(std::chrono::seconds(60))));
    if (group.membership().rank == 2) {
      EXPECT_EQ(group.shrink(store, {2}, true).error().code, ErrorCode::kInvalidArgument);
      (void)store.get("over", Deadline::after(std::chrono::seconds(60)));
      return;
    }
    const Work stuck = group.barrier({.async = true});
    const auto rest = group.shrink(store, {2}, true);
    ASSERT_TRUE(rest) << rest.error().to_string();
    EXPECT_EQ(stuck.wait().error().code, ErrorCode::kAborted);
    EXPECT_EQ(sum_of(**rest, 1), 2);
    ASSERT_TRUE(store.set("over", {}, Deadline::after(std::chrono::seconds(60))));
  });
}

TEST(GroupLeave, FailsPendingAndLaterCallsOfOtherRanks) {
  for (const char* transports : {"shm", "unix", "tcp"}) {
    const auto store = memory_store();
    std::latch failed_everywhere(2);
    run_ranks(2, [&](Rank rank) {
      const auto group = Group::form(*store, {rank, 2, transports, 0}, options_for(transports));
      ASSERT_TRUE(group) << group.error().to_string();
      EXPECT_EQ(sum_of(**group, 1), 2);
      if (rank == 0) {
        const Result<> failed = (*group)->barrier().result();
        EXPECT_EQ(failed.error().code, ErrorCode::kLeft) << failed.error().to_string();
        EXPECT_EQ(failed.error().rank, 1);
      } else {
        (*group)->leave();
        (*group)->leave();
        int64_t data = 0;
        const BufferView view(&data, 1, Dtype::kInt64);
        for (const Work& work : {(*group)->barrier(), (*group)->barrier({.async = true}), (*group)->send(view, 0, 0),
                                 (*group)->receive(view, 0, 0)}) {
          const std::string text = work.wait().error().to_string();
          EXPECT_NE(text.find("was shut down here"), std::string::npos) << text;
        }
        EXPECT_FALSE((*group)->status());
      }
      failed_everywhere.arrive_and_wait();
    });
  }
}

TEST(GroupPending, AreWaitedForTogether) {
  test::run_group(2, "shm", [](Group& group) {
    std::vector<std::vector<float>> data(20, std::vector<float>(50'000, 1.0f));
    std::vector<Work> works;
    for (auto& each : data) {
      works.push_back(group.all_reduce({each.data(), each.size(), Dtype::kFloat32}, ReduceOp::kSum, {.async = true}));
    }
    ASSERT_TRUE(group.wait_for_pending(Deadline::after(std::chrono::seconds(60))));
    for (const Work& work : works) EXPECT_TRUE(work.done());
  });
}

TEST(GroupPending, ListsPendingOperations) {
  const auto store = memory_store();
  std::latch asked(1);
  run_ranks(2, [&](Rank rank) {
    const auto group = Group::form(*store, {rank, 2, "test", 0}, options_for("shm"));
    ASSERT_TRUE(group);
    if (rank == 1) asked.wait();
    const Work work = (*group)->barrier({.async = true});
    if (rank == 0) {
      const auto waited = (*group)->wait_for_pending(Deadline::after(std::chrono::milliseconds(20)));
      ASSERT_FALSE(waited);
      EXPECT_EQ(waited.error().code, ErrorCode::kTimeout);
      EXPECT_NE(waited.error().message.find("1 of the 1 operations"), std::string::npos) << waited.error().message;
      asked.count_down();
    }
    EXPECT_TRUE(work.wait());
  });
}

TEST(GroupHook, IsCalledForEveryCompletedOperation) {
  test::run_group(2, "shm", [](Group& group) {
    struct Completions {
      std::mutex mutex;
      std::vector<uint64_t> sequences;
    };
    // shared_ptr: the hook of the asynchronous call may run after its Work is done, after the next call, and after this
    // function returns.
    const auto completions = std::make_shared<Completions>();
    group.on_completion([completions](const Finished& finished) {
      EXPECT_TRUE(finished.result);
      EXPECT_LE(finished.submitted, finished.started);
      EXPECT_LE(finished.started, finished.ended);
      const std::lock_guard lock(completions->mutex);
      completions->sequences.push_back(finished.call.sequence);
    });
    EXPECT_TRUE(group.barrier().result());
    const Work work = group.barrier({.async = true});
    EXPECT_TRUE(work.wait());
    EXPECT_TRUE(group.barrier().result());
    group.on_completion(nullptr);
    EXPECT_TRUE(group.barrier().result());
    EXPECT_TRUE(group.wait_for_pending(Deadline::after(std::chrono::seconds(60))));
    const std::lock_guard lock(completions->mutex);
    const std::vector<uint64_t>& sequences = completions->sequences;
    EXPECT_GE(sequences.size(), 2U);
    EXPECT_EQ(std::set<uint64_t>(sequences.begin(), sequences.end()).size(), sequences.size());
    for (const uint64_t sequence : sequences) EXPECT_LE(sequence, 3U);
  });
}

TEST(GroupTimeout, CanBeChanged) {
  test::run_group(2, "shm", [](Group& group) {
    EXPECT_EQ(group.timeout(), std::chrono::seconds(60));
    ASSERT_TRUE(group.set_timeout(std::chrono::seconds(30)));
    EXPECT_EQ(group.timeout(), std::chrono::seconds(30));
    for (const int none : {0, -1}) {
      const auto result = group.set_timeout(std::chrono::seconds(none));
      ASSERT_FALSE(result);
      EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
      EXPECT_NE(result.error().message.find("must be greater than zero"), std::string::npos) << result.error().message;
    }
    EXPECT_EQ(group.timeout(), std::chrono::seconds(30));
  });
}

TEST(MonitoredBarrier, PassesIfAllRanksArrive) {
  run_with_store(3, [](Group& group, Store& store) {
    for (int i = 0; i < 3; ++i) {
      const auto result = group.monitored_barrier(store, std::chrono::seconds(60), true);
      EXPECT_TRUE(result) << result.error().to_string();
    }
  });
}

TEST(MonitoredBarrier, NamesMissingRanksAndKeepsTheGroup) {
  run_with_store(4, [](Group& group, Store& store) {
    const Rank rank = group.membership().rank;
    if (rank == 0 || rank == 2) {
      const auto result = group.monitored_barrier(store, std::chrono::milliseconds(200), true);
      ASSERT_FALSE(result);
      EXPECT_EQ(result.error().code, ErrorCode::kTimeout);
      const std::string text = result.error().to_string();
      // On a loaded machine, rank 2 may be late itself.
      EXPECT_NE(text.find(rank == 0 ? "failed to pass monitoredBarrier" : "Rank 2 successfully reached"),
                std::string::npos)
          << text;
      if (rank == 0) {
        EXPECT_NE(text.find("Ranks 1, "), std::string::npos) << text;
        EXPECT_NE(text.find("3 failed"), std::string::npos) << text;
      }
    }
    EXPECT_TRUE(group.status());
    EXPECT_EQ(sum_of(group, 1), 4);
  });
}

TEST(MonitoredBarrier, NamesOnlyTheFirstIfRequested) {
  run_with_store(3, [](Group& group, Store& store) {
    if (group.membership().rank == 0) {
      const auto result = group.monitored_barrier(store, std::chrono::milliseconds(50), false);
      ASSERT_FALSE(result);
      EXPECT_EQ(result.error().rank, 1);
      EXPECT_NE(result.error().message.find("Rank 1 failed"), std::string::npos) << result.error().message;
    }
    EXPECT_EQ(sum_of(group, 1), 3);
  });
}

}  // namespace
}  // namespace muster
