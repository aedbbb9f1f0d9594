// Tensors that are allocated in memory which the ranks of a host share.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "group/ranks.h"
#include "muster/shm/arena.h"

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
    ASSERT_TRUE(group.barrier().result());  // the other ranks may still read it
    arena->free(data);
  });
}

TEST(GroupArena, IsSharedWithDerivedGroups) {
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

TEST(GroupArena, IsMissingWithoutSharedMemory) {
  test::run_group(2, "tcp", [](Group& group) { EXPECT_FALSE(group.arena()); });
  test::run_group(1, "shm", [](Group& group) { EXPECT_FALSE(group.arena()); });
}

/// Leaves enough memory for `links` links of 2 MiB each, but not for a host communicator (4 MiB at least, 34 MiB for 17
/// ranks).
void limit_memory(size_t links) {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t most = pages * sysconf(_SC_PAGESIZE) + (links * 2 << 20) + (3 << 20);
  const rlimit limit{most, most};
  setrlimit(RLIMIT_AS, &limit);
}

/// The same for the rank that allocates the memory. The memory is a file, so a limit on file sizes has this effect.
void limit_files() {
  const rlimit limit{3 << 20, 3 << 20};
  setrlimit(RLIMIT_FSIZE, &limit);
}

/// True if the group forms without shared memory and works.
bool works_without_memory(Store& store, const GroupSpec& membership) {
  const auto group = Group::form(store, membership, test::options_for("shm"));
  if (!group) {
    std::fprintf(stderr, "rank %d: %s\n", membership.rank, group.error().to_string().c_str());
    return false;
  }
  int32_t value = membership.rank;
  const auto result = (*group)->all_reduce({&value, 1, Dtype::kInt32}, ReduceOp::kSum).result();
  return !(*group)->arena() && result && value == membership.size * (membership.size - 1) / 2;
}

/// Forms two groups, one after the other. Both work without shared memory, and every process logs the warning once.
bool work_without_memory(Rank rank, int size, const std::string& path) {
  const auto store = file_store(path);
  testing::internal::CaptureStderr();
  const bool work = store && works_without_memory(**store, {rank, size, "one", 0}) &&
                    works_without_memory(**store, {rank, size, "two", 0});
  const std::string output = testing::internal::GetCapturedStderr(), warning = "does not use shared memory";
  const size_t found = output.find(warning);
  const bool once = found != std::string::npos && output.find(warning, found + 1) == std::string::npos;
  if (!work || !once) std::fprintf(stderr, "rank %d: %s\n", rank, output.c_str());
  return work && once;
}

class GroupWithoutArena : public testing::TestWithParam<std::tuple<int, Rank>> {};

/// The rank without memory is the host's first rank, which allocates the memory, or another rank, which maps it. The
/// group is one that links all pairs, or a larger one.
TEST_P(GroupWithoutArena, WorksWithoutMemoryAtOneRankAndWarnsOnce) {
  const auto [size, poor] = GetParam();
  const std::string path = testing::TempDir() + "muster-arena-" + std::to_string(getpid());
  std::filesystem::remove(path);
  std::vector<pid_t> children(size);
  std::fflush(nullptr);  // otherwise each child writes the buffered output again
  for (Rank rank = 0; rank < size; ++rank) {
    children[rank] = fork();
    ASSERT_GE(children[rank], 0);
    if (children[rank] != 0) continue;
    if (rank == poor && rank == 0) limit_files();
    if (rank == poor && rank != 0) limit_memory(size > 16 ? 5 : 1);
    _exit(work_without_memory(rank, size, path) ? 0 : 1);
  }
  for (Rank rank = 0; rank < size; ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(children[rank], &status, 0), children[rank]);
    EXPECT_EQ(status, 0) << "rank " << rank;
  }
  std::filesystem::remove(path);
}

std::string without_arena_name(const testing::TestParamInfo<std::tuple<int, Rank>>& info) {
  const auto [size, poor] = info.param;
  return "rank" + std::to_string(poor) + "_of_" + std::to_string(size);
}

INSTANTIATE_TEST_SUITE_P(Groups, GroupWithoutArena,
                         testing::Values(std::tuple(2, 0), std::tuple(2, 1), std::tuple(3, 0), std::tuple(17, 0),
                                         std::tuple(17, 16)),
                         without_arena_name);

}  // namespace
}  // namespace muster
