#include "muster/collective/schedule/rounds.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "muster/collective/algorithms/algorithms.h"

namespace muster::test {
namespace {

SliceValue sum_of_ranks(size_t slice, int size) {
  SliceValue sum;
  for (Rank rank = 0; rank < size; ++rank) sum.push_back({slice, rank});
  return sum;
}

/// The slices that `rank` must hold in the end. Empty if the definition leaves its output open.
std::vector<SliceValue> expected(const CollectiveSpec& spec, Rank rank) {
  const auto size = static_cast<size_t>(spec.size);
  const bool root = rank == spec.root;
  std::vector<SliceValue> slices;
  switch (spec.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
      for (size_t slice = 0; slice < spec.count && (root || spec.collective == Collective::kAllReduce); ++slice) {
        slices.push_back(sum_of_ranks(slice, spec.size));
      }
      break;
    case Collective::kBroadcast:
      for (size_t slice = 0; slice < spec.count; ++slice) slices.push_back({{slice, spec.root}});
      break;
    case Collective::kAllGather:
    case Collective::kGather:
      for (size_t from = 0; from < size && (root || spec.collective == Collective::kAllGather); ++from) {
        slices.push_back({{0, static_cast<Rank>(from)}});
      }
      break;
    case Collective::kReduceScatter:
      return {sum_of_ranks(static_cast<size_t>(rank), spec.size)};
    case Collective::kScatter:
      return {{{static_cast<size_t>(rank), spec.root}}};
    case Collective::kAllToAll:
      for (size_t from = 0; from < size; ++from) {
        slices.push_back({{static_cast<size_t>(rank), static_cast<Rank>(from)}});
      }
      break;
    case Collective::kBarrier:
      break;
  }
  return slices;
}

class RoundsOf : public testing::TestWithParam<Algorithm> {};

TEST_P(RoundsOf, EndWithTheDefinedResult) {
  const Algorithm& algorithm = GetParam();
  for (int size = 1; size <= 9; ++size) {
    for (Rank root = 0; root < size; ++root) {
      CollectiveSpec spec{.collective = algorithm.collective, .size = size, .element_bytes = 4, .root = root};
      const bool whole = algorithm.collective == Collective::kAllReduce ||
                         algorithm.collective == Collective::kReduce || algorithm.collective == Collective::kBroadcast;
      spec.count = algorithm.collective == Collective::kBarrier ? 0 : whole ? size : 1;
      spec.chunk_bytes = spec.element_bytes;
      std::vector<Schedule> schedules;
      for (spec.rank = 0; spec.rank < size; ++spec.rank) schedules.push_back(algorithm.schedule(spec));
      const Rounds rounds = play_rounds(spec, schedules);
      for (Rank rank = 0; rank < size; ++rank) {
        const auto wanted = expected(spec, rank);
        if (!wanted.empty() && size > 1) {
          EXPECT_EQ(rounds.held.back()[rank], wanted) << size << " ranks, root " << root << ", rank " << rank;
        }
      }
      if (size > 1) {
        EXPECT_EQ(rounds.messages.back().round, static_cast<int>(rounds.held.size()) - 1);
      }
    }
  }
}

TEST(Rounds, OfARingAreTwiceTheOtherRanks) {
  const Algorithm* ring = find_algorithm(Collective::kAllReduce, "ring");
  CollectiveSpec spec{.collective = Collective::kAllReduce, .size = 3, .count = 3, .element_bytes = 4};
  std::vector<Schedule> schedules;
  for (spec.rank = 0; spec.rank < 3; ++spec.rank) schedules.push_back(ring->schedule(spec));
  const Rounds rounds = play_rounds(spec, schedules);
  EXPECT_EQ(rounds.held.size(), 1 + 4u);
  EXPECT_EQ(rounds.messages.size(), 4 * 3u);
  const std::vector<SliceValue> sum_of_two{{{2, 0}, {2, 2}}};
  const Rounds::Message second{.round = 2, .from = 0, .to = 1, .slices = sum_of_two};
  EXPECT_EQ(std::ranges::count(rounds.messages, second), 1) << "rank 0 adds its slice c to that of rank 2";
}

std::string name_of(const testing::TestParamInfo<Algorithm>& info) {
  return std::string(name(info.param.collective)) + "_" + info.param.name;
}
INSTANTIATE_TEST_SUITE_P(All, RoundsOf, testing::ValuesIn(algorithms()), name_of);

}  // namespace
}  // namespace muster::test
