// A process forks while it has a group. The child may drop the group that it inherited and form its own group. The
// parent's group must keep working.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <future>

#include "base/sanitized.h"
#include "group/ranks.h"
#include "muster/shm/arena.h"

namespace muster {
namespace {

using Floats = std::vector<float>;

BufferView view(Floats& data) { return {data.data(), data.size(), Dtype::kFloat32}; }

/// Starts a child that runs `body` and exits normally. A signal ends a child that hangs.
pid_t start_child(const std::function<bool()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child != 0) return child;
  alarm(60);
  std::exit(body() ? 0 : 1);
}

void expect_success(pid_t child) {
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_FALSE(WIFSIGNALED(status)) << "the child hung or crashed: signal " << WTERMSIG(status);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

class GroupFork : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto store = memory_store();
    test::run_ranks(2, [&](Rank rank) {
      auto made = Group::form(*store, {rank, 2, "fork", 0}, test::options_for(GetParam()));
      ASSERT_TRUE(made) << made.error().to_string();
      groups_[rank] = std::move(*made);
    });
    use();  // after this, all threads and links exist
  }
  void TearDown() override {
    test::run_ranks(2, [&](Rank rank) { groups_[rank].reset(); });
  }

  void use() {
    test::run_ranks(2, [&](Rank rank) {
      Group& group = *groups_[rank];
      Floats data(1000, 1.0f), other(100'000, 2.0f);
      const auto queued = group.all_reduce(view(data), ReduceOp::kSum, {.async = true});
      EXPECT_TRUE(queued.wait()) << queued.result().error().to_string();
      const auto barrier = group.barrier().result();
      EXPECT_TRUE(barrier) << barrier.error().to_string();
      const Work message = rank == 0 ? group.send(view(other), 1, 1) : group.receive(view(other), 0, 1);
      const auto moved = message.wait();
      EXPECT_TRUE(moved) << moved.error().to_string();
      EXPECT_TRUE(group.status());
    });
  }

  std::unique_ptr<Group> groups_[2];
};

TEST_P(GroupFork, ChildDropsAGroup) {
  expect_success(start_child([this] {
    groups_[0].reset();
    groups_[1].reset();
    return true;
  }));
  use();
}

TEST_P(GroupFork, ChildLeavesAndAbortsNothing) {
  expect_success(start_child([this] {
    groups_[0]->leave();
    groups_[1]->abort({ErrorCode::kAborted, "the child has had enough", 1, {}});
    return true;
  }));
  use();
}

TEST_P(GroupFork, ChildDropsAGroupWhileItsThreadsAreBusy) {
  Floats in(10), out(10), sum(10, 1.0f);
  const Work message = groups_[0]->receive(view(in), 1, 2, {.async = true});
  const Work collective = groups_[0]->all_reduce(view(sum), ReduceOp::kSum, {.async = true});
  std::thread waiter([&] { EXPECT_TRUE(message.wait()); });
  for (int i = 0; i < 10; ++i) {  // each time the threads are at another point
    Work dropped[] = {message, collective};
    expect_success(start_child([&] {
      for (Work& work : dropped) work = Work(Result<>());
      groups_[0].reset();
      return true;
    }));
  }
  Floats others(10, 1.0f);
  EXPECT_TRUE(groups_[1]->all_reduce(view(others), ReduceOp::kSum).wait());
  EXPECT_TRUE(groups_[1]->send(view(out), 0, 2).wait());
  EXPECT_TRUE(collective.wait());
  waiter.join();
  use();
}

TEST_P(GroupFork, ChildrenFormAGroupWhileThreadsFormOthers) {
  if (MUSTER_SANITIZED) {
    GTEST_SKIP() << "another thread may hold a lock of the sanitizer's allocator while this one forks";
  }
  std::atomic<bool> stopping = false;
  std::thread others([&] {
    while (!stopping) test::run_group(2, GetParam(), [](Group&) {});
  });
  const std::string path = testing::TempDir() + "muster-fork-" + std::to_string(getpid());
  for (int round = 0; round < 5; ++round) {
    std::filesystem::remove(path);
    const auto form = [&](Rank rank) {
      const auto store = file_store(path);
      const auto group = Group::form(**store, {rank, 2, "children", 0}, test::options_for(GetParam()));
      return group && (*group)->barrier().result();
    };
    const pid_t first = start_child([&] { return form(0); }), second = start_child([&] { return form(1); });
    expect_success(first);
    expect_success(second);
  }
  stopping = true;
  others.join();
  std::filesystem::remove(path);
  use();
}

INSTANTIATE_TEST_SUITE_P(Kinds, GroupFork, testing::Values("shm", "unix", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace muster
