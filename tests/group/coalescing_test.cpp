// Calls that are coalesced into fewer operations.
#include <numeric>

#include "group/ranks.h"
#include "muster/group/operations.h"

namespace muster {
namespace {

Operation operation(Collective collective, void* input, size_t in, void* output, size_t out, size_t count) {
  Operation made;
  made.call.collective = collective;
  made.call.dtype = Dtype::kInt32;
  made.call.count = count;
  made.input = {input, in, Dtype::kInt32};
  made.output = {output, out, Dtype::kInt32};
  return made;
}

TEST(Coalesce, MergesOnlyNeighborsOfOneKind) {
  int32_t a = 0, b = 0, c = 0;
  const auto merged =
      coalesce({operation(Collective::kAllReduce, &a, 1, &a, 1, 1), operation(Collective::kAllReduce, &b, 1, &b, 1, 1),
                operation(Collective::kBroadcast, &c, 1, &c, 1, 1), operation(Collective::kAllReduce, &c, 1, &c, 1, 1)},
               2);
  ASSERT_EQ(merged.size(), 3U);
  EXPECT_EQ(merged[0].call.count, 2U);
  EXPECT_EQ(merged[0].input.at(4, 4).data, &b);
  EXPECT_EQ(merged[1].call.collective, Collective::kBroadcast);
}

TEST(Coalesce, SeparatesCallsOfOtherDtypeOpRootOrFactor) {
  int32_t value = 0;
  const auto one = operation(Collective::kReduce, &value, 1, &value, 1, 1);
  for (int what = 0; what < 4; ++what) {
    auto other = one;
    if (what == 0) other.call.op = ReduceOp::kMax;
    if (what == 1) other.call.root = 1;
    if (what == 2) other.call.dtype = Dtype::kUint32;
    if (what == 3) other.factor = 2;
    EXPECT_EQ(coalesce({one, other}, 2).size(), 2U) << what;
  }
  EXPECT_EQ(coalesce({one, one}, 2).size(), 1U);
}

class CoalescedGroup : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, CoalescedGroup, testing::Values("shm", "unix"));

TEST_P(CoalescedGroup, MatchesSeparateCalls) {
  constexpr int kRanks = 3;
  test::run_group(kRanks, GetParam(), [](Group& group) {
    const int32_t rank = group.membership().rank;
    std::vector<int32_t> sums(1000, rank), more(7, 10 * rank), roots(5, rank);
    std::vector<int32_t> block_a(2, rank), block_b(3, 100 + rank), all_a(2 * kRanks), all_b(3 * kRanks);
    std::vector<int32_t> parts_a(2 * kRanks), parts_b(kRanks), mine_a(2), mine_b(1);
    std::iota(parts_a.begin(), parts_a.end(), 0);
    std::iota(parts_b.begin(), parts_b.end(), 50);
    const auto view = [](std::vector<int32_t>& data) { return BufferView{data.data(), data.size(), Dtype::kInt32}; };

    const auto call = [&](Collective collective, std::vector<int32_t>& input, std::vector<int32_t>& output) {
      Operation made;
      made.call.collective = collective;
      made.call.root = collective == Collective::kBroadcast ? 2 : 0;
      made.input = view(input);
      made.output = view(output);
      return made;
    };
    const auto result =
        group
            .submit({call(Collective::kAllReduce, sums, sums), call(Collective::kAllReduce, more, more),
                     call(Collective::kAllGather, block_a, all_a), call(Collective::kAllGather, block_b, all_b),
                     call(Collective::kReduceScatter, parts_a, mine_a),
                     call(Collective::kReduceScatter, parts_b, mine_b), call(Collective::kBroadcast, roots, roots)},
                    {.async = rank == 1})
            .wait();
    ASSERT_TRUE(result) << result.error().to_string();

    EXPECT_EQ(sums, std::vector<int32_t>(1000, 3));
    EXPECT_EQ(more, std::vector<int32_t>(7, 30));
    EXPECT_EQ(all_a, (std::vector<int32_t>{0, 0, 1, 1, 2, 2}));
    EXPECT_EQ(all_b, (std::vector<int32_t>{100, 100, 100, 101, 101, 101, 102, 102, 102}));
    EXPECT_EQ(mine_a, (std::vector<int32_t>{3 * (2 * rank), 3 * (2 * rank + 1)}));
    EXPECT_EQ(mine_b, (std::vector<int32_t>{3 * (50 + rank)}));
    EXPECT_EQ(roots, std::vector<int32_t>(5, 2));
    EXPECT_EQ(group.sequence(), 4U);
  });
}

TEST(CoalescedCalls, AreCompleteIfEmpty) {
  test::run_group(1, "shm", [](Group& group) { EXPECT_TRUE(group.submit(std::vector<Operation>{}).result()); });
}

TEST(CoalescedCalls, DoNotStartIfOneHasWrongArguments) {
  test::run_group(2, "shm", [](Group& group) {
    int32_t value = 0;
    const auto good = operation(Collective::kAllReduce, &value, 1, &value, 1, 1);
    const auto bad = operation(Collective::kAllGather, &value, 1, &value, 1, 1);
    EXPECT_EQ(group.submit({good, bad}).result().error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(group.sequence(), 0U);
    EXPECT_EQ(group.submit(bad).result().error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(group.submit({good, good}).result());
    EXPECT_EQ(group.sequence(), 1U);
  });
}

}  // namespace
}  // namespace muster
