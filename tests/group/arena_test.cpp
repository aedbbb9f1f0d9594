// Tensors that are born in memory which the ranks of a host share.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "group/ranks.h"
#include "muster/transport/shm/arena.h"

namespace muster {
namespace {

TEST(GroupArena, HoldsTensorsThatCollectivesReduceInPlace) {
  test::run_group(3, "shm", [](Group& group) {
    const auto arena = group.arena();
    ASSERT_TRUE(arena);
    constexpr size_t kCount = 300'000;
    const auto memory = arena->allocate(kCount * sizeof(float));
    ASSERT_TRUE(memory) << memory.error().to_string();
    float* const data = static_cast<float*>(*memory);
    for (int round = 0; round < 3; ++round) {
      std::fill_n(data, kCount, static_cast<float>(group.membership().rank + 1));
      const auto result = group.all_reduce({data, kCount, Dtype::kFloat32}, ReduceOp::kSum).result();
      ASSERT_TRUE(result) << result.error().to_string();
      ASSERT_EQ(std::count(data, data + kCount, 6.0f), static_cast<int64_t>(kCount));
    }
    ASSERT_TRUE(group.barrier().result());  // the others may still read it
    arena->free(data);
  });
}

TEST(GroupArena, IsHandedOnToGroupsMadeOfAGroup) {
  const auto store = memory_store();
  test::run_ranks(2, [&](Rank rank) {
    const auto handle = store->clone();
    const auto group = Group::form(**handle, {rank, 2, "parent", 0}, test::options_for("shm"));
    ASSERT_TRUE(group);
    const auto half = (*group)->split(**handle, {1, 0}, "turned");
    ASSERT_TRUE(half) << half.error().to_string();
    EXPECT_EQ((*half)->arena(), (*group)->arena());
  });
}

TEST(GroupArena, IsMissingWhereNoMemoryIsShared) {
  test::run_group(2, "tcp", [](Group& group) { EXPECT_FALSE(group.arena()); });
  test::run_group(1, "shm", [](Group& group) { EXPECT_FALSE(group.arena()); });
}

/// Leaves enough for the 2 MiB of a link, not for the 4 of a team.
void limit_memory() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t most = pages * sysconf(_SC_PAGESIZE) + (5 << 20);
  const rlimit limit{most, most};
  setrlimit(RLIMIT_AS, &limit);
}

/// Whether the group formed without shared memory, and works.
bool works_without_memory(Rank rank, const std::string& path) {
  const auto store = file_store(path);
  if (!store) return false;
  const auto group = Group::form(**store, {rank, 2, "test", 0}, test::options_for("shm"));
  if (!group) {
    std::fprintf(stderr, "rank %d: %s\n", rank, group.error().to_string().c_str());
    return false;
  }
  int32_t value = rank + 1;
  const auto result = (*group)->all_reduce({&value, 1, Dtype::kInt32}, ReduceOp::kSum).result();
  return !(*group)->arena() && result && value == 3;
}

TEST(GroupArena, IsMissingEverywhereWhereOneRankHasNoMemoryForItsPart) {
  const std::string path = testing::TempDir() + "muster-arena-" + std::to_string(getpid());
  std::filesystem::remove(path);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    limit_memory();
    _exit(works_without_memory(1, path) ? 0 : 1);
  }
  EXPECT_TRUE(works_without_memory(0, path));
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::filesystem::remove(path);
}

/// Larger groups do not vote. Those who have formed, and those who still form, hear the reason over the tree of links.
TEST(GroupArena, ThatOneRankOfManyCannotHaveIsNamedToAllOthers) {
  constexpr int kSize = 17;
  constexpr Rank kPoor = kSize - 1;
  const std::string path = testing::TempDir() + "muster-arena-" + std::to_string(getpid());
  std::filesystem::remove(path);
  const auto soon = [] { return Deadline::after(std::chrono::seconds(60)); };
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    limit_memory();
    const auto store = file_store(path);
    const auto group = Group::form(**store, {kPoor, kSize, "test", 0}, test::options_for("shm"));
    (void)(*store)->get("over", soon());  // its death must not come first
    _exit(group ? 1 : 0);
  }
  const auto store = file_store(path);
  ASSERT_TRUE(store);
  test::run_ranks(kPoor, [&](Rank rank) {
    const auto handle = (*store)->clone();
    const auto group = Group::form(**handle, {rank, kSize, "test", 0}, test::options_for("shm"));
    const auto result = group ? (*group)->barrier().result() : tl::unexpected(group.error());
    ASSERT_FALSE(result);
    const std::string text = result.error().to_string();
    EXPECT_EQ(result.error().rank, kPoor) << text;
    EXPECT_NE(text.find("cannot map"), std::string::npos) << text;
  });
  EXPECT_TRUE((*store)->set("over", {}, soon()));
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace muster
