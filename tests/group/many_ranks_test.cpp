// Groups of more ranks than are linked at once, as threads: over shared memory and over links that are made when a
// schedule needs them. MUSTER_RANKS sets how many (512 is what we promise).
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <latch>

#include "group/ranks.h"

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

TEST_P(ManyRanks, HearOfAnAbortThoughFewAreLinked) {
  const auto store = memory_store();
  const int size = ranks();
  std::latch formed(size);
  run_ranks(size, [&](Rank rank) {
    const auto handle = store->clone();
    const auto group = Group::form(**handle, {rank, size, "test", 0}, patient(GetParam()));
    ASSERT_TRUE(group) << group.error().to_string();
    formed.arrive_and_wait();
    if (rank == size - 1) (*group)->abort(Error{ErrorCode::kAborted, "the operator said so", rank, {}});
    const auto result = (*group)->barrier().result();
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().rank, size - 1) << result.error().to_string();
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
        EXPECT_EQ(group.transport(), "shm+tcp");  // whatever links there are yet
        expect_collectives(group);
      });
}

}  // namespace
}  // namespace muster
