// Groups that are too large to link all pairs, with ranks as threads: over shared memory, and over links that are made
// when a schedule needs them. MUSTER_RANKS sets the number of ranks (512 is supported).
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <latch>
#include <string>

#include "group/ranks.h"
#include "muster/group/form/mesh.h"
#include "muster/store/stat.h"

namespace muster {
namespace {

using test::options_for;
using test::run_ranks;

int ranks() {
  int ranks = 40;
  if (const char* text = std::getenv("MUSTER_RANKS")) std::from_chars(text, text + std::strlen(text), ranks);
  return ranks;
}

GroupOptions patient(const std::string& transports) { return options_for(transports, std::chrono::seconds(300)); }

void expect_collectives(Group& group) {
  const auto [rank, size, name, generation] = group.membership();
  std::vector<int32_t> data(1000, rank), all(size);
  const BufferView view{data.data(), data.size(), Dtype::kInt32};
  const auto sum = group.all_reduce(view, ReduceOp::kSum).result();
  ASSERT_TRUE(sum) << sum.error().to_string();
  EXPECT_EQ(data, std::vector<int32_t>(1000, size * (size - 1) / 2));
  std::fill(data.begin(), data.end(), rank);
  ASSERT_TRUE(group.broadcast(view, size / 2).result());
  EXPECT_EQ(data, std::vector<int32_t>(1000, size / 2));
  int32_t mine = 3 * rank;
  ASSERT_TRUE(group.all_gather({&mine, 1, Dtype::kInt32}, {all.data(), all.size(), Dtype::kInt32}).result());
  for (Rank from = 0; from < size; ++from) ASSERT_EQ(all[from], 3 * from);
  ASSERT_TRUE(group.barrier().result());
}

class ManyRanks : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, ManyRanks, testing::Values("shm", "unix"));

TEST_P(ManyRanks, FormAGroupAndRunItsCollectives) { test::run_group(ranks(), patient(GetParam()), expect_collectives); }

TEST_P(ManyRanks, LearnOfAnAbortOverFewLinks) {
  const auto store = memory_store();
  const int size = ranks();
  std::latch formed(size);
  run_ranks(size, [&](Rank rank) {
    const auto handle = store->clone();
    const auto group = Group::form(**handle, {rank, size, "test", 0}, patient(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    formed.arrive_and_wait();
    if (rank == size - 1) (*group)->abort(Error{ErrorCode::kAborted, "the operator requested it", rank, {}});
    const auto result = (*group)->barrier().result();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().rank, size - 1) << result.error().to_string();
  });
}

/// Failure reasons travel along the tree of links. The busy rank lies between the last rank and most other ranks.
TEST(ManyRanksOfAHost, NameTheAborterThoughARelayingRankIsBusy) {
  constexpr int kSize = 24;
  const Rank relaying_rank = tree_parent(tree_parent(kSize - 1));
  ASSERT_NE(relaying_rank, 0);
  std::latch formed(kSize), failed(kSize - 1);
  const auto store = memory_store();
  run_ranks(kSize, [&](Rank rank) {
    const auto handle = store->clone();
    const auto group = Group::form(**handle, {rank, kSize, "test", 0}, patient("shm"));
    ASSERT_TRUE(group) << group.error().to_string();
    formed.arrive_and_wait();
    if (rank == relaying_rank) return failed.wait();
    if (rank == kSize - 1) (*group)->abort(Error{ErrorCode::kAborted, "the operator requested it", rank, {}});
    const auto result = (*group)->barrier().result();
    failed.count_down();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().rank, kSize - 1) << result.error().to_string();
  });
}

TEST(Forming, CostsEachRankFiveRoundTripsOfTheStore) {
  for (const int size : {2, 16, 17, 40}) {
    const auto store = memory_store();
    const auto soon = [] { return Deadline::after(std::chrono::seconds(60)); };
    const uint64_t before = store->stat(soon())->operations;
    run_ranks(size, [&](Rank rank) {
      const auto handle = store->clone();
      const auto group = Group::form(**handle, {rank, size, "test", 0}, patient("shm"));
      ASSERT_TRUE(group) << group.error().to_string();
      ASSERT_TRUE((*group)->barrier().result());
    });
    EXPECT_LE(store->stat(soon())->operations - before, 5U * size) << "with " << size << " ranks";
  }
}

/// Counts the shared-memory links whose ends are all in this process.
size_t count_links() {
  std::ifstream maps("/proc/self/maps");
  size_t ends = 0;
  for (std::string line; std::getline(maps, line);) ends += line.find("muster-link") != std::string::npos ? 1 : 0;
  return ends / 2;
}

/// If all ranks share memory, only the tree is linked. It carries failure reports but never tensors.
TEST(ManyRanksOfAHost, AreLinkedOnlyByATree) {
  constexpr int kSize = 24;
  std::latch formed(kSize), counted(kSize), worked(kSize);
  test::run_group(kSize, patient("shm"), [&](Group& group) {
    formed.arrive_and_wait();
    if (group.membership().rank == 0) {
      EXPECT_EQ(count_links(), kSize - 1U);
    }
    counted.arrive_and_wait();
    expect_collectives(group);
    worked.arrive_and_wait();
    if (group.membership().rank == 0) {
      EXPECT_EQ(count_links(), kSize - 1U);
    }
  });
}

TEST(ManyRanksOnHosts, LinkOnlyWithTheirCounterparts) {
  test::run_group(
      24,
      [](Rank rank) {
        auto options = patient("shm,tcp");
        options.host_label = std::to_string(rank / 6);
        return options;
      },
      [](Group& group) {
        EXPECT_EQ(group.transport(), "shm+tcp");  // does not depend on the links that exist already
        expect_collectives(group);
      });
}

}  // namespace
}  // namespace muster
