#include "muster/collective/cost/cost.h"

#include <gtest/gtest.h>

#include "collective/trial.h"
#include "muster/collective/schedule/evaluation.h"

namespace muster::test {
namespace {

/// The spec of a collective on a tensor of `bytes`, or on n blocks of `bytes` in total.
CollectiveSpec spec_of(Collective collective, int size, size_t bytes) {
  const bool blocks = !has_root(collective) && collective != Collective::kAllReduce;
  const bool rooted_blocks = collective == Collective::kScatter || collective == Collective::kGather;
  const size_t parts = blocks || rooted_blocks ? static_cast<size_t>(size) : 1;
  return {.collective = collective, .size = size, .count = std::max<size_t>(bytes / 4 / parts, 1), .element_bytes = 4};
}

double evaluated(const Algorithm& algorithm, CollectiveSpec spec) {
  std::vector<Schedule> schedules;
  for (spec.rank = 0; spec.rank < spec.size; ++spec.rank) schedules.push_back(algorithm.schedule(spec));
  return evaluate(schedules, spec.costs);
}

constexpr int kSizes[] = {2, 3, 4, 7, 8, 16, 31, 64};
constexpr size_t kBytes[] = {8, 4 << 10, 64 << 10, 1 << 20, 16 << 20};

class EveryAlgorithm : public testing::TestWithParam<Algorithm> {};

TEST_P(EveryAlgorithm, TakesAboutAsLongAsPredicted) {
  for (const int size : kSizes) {
    for (const size_t bytes : kBytes) {
      const CollectiveSpec spec = spec_of(GetParam().collective, size, bytes);
      const double closed = predict(spec, GetParam()), played = evaluated(GetParam(), spec);
      EXPECT_LT(closed, 2.2 * played) << size << " ranks, " << bytes << " bytes";
      EXPECT_GT(closed, played / 2) << size << " ranks, " << bytes << " bytes";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryAlgorithm, testing::ValuesIn(algorithms()), parameter_name);

TEST(Choose, IsNearlyTheFastestInSimulation) {
  for (int number = 1; number < kCollectiveCount; ++number) {
    const auto collective = static_cast<Collective>(number);
    for (const int size : kSizes) {
      for (const size_t bytes : kBytes) {
        const CollectiveSpec spec = spec_of(collective, size, bytes);
        double best = 1e9;
        for (const Algorithm& algorithm : algorithms(collective)) best = std::min(best, evaluated(algorithm, spec));
        EXPECT_LT(evaluated(*choose(spec), spec), 1.6 * best)
            << name(collective) << " by " << choose(spec)->name << ", " << size << " ranks, " << bytes << " bytes";
      }
    }
  }
}

TEST(Choose, IsTheSameAtEveryRank) {
  for (int number = 1; number < kCollectiveCount; ++number) {
    CollectiveSpec spec{.collective = static_cast<Collective>(number), .size = 5, .count = 1000, .root = 3};
    const Algorithm* first = choose(spec);
    for (spec.rank = 0; spec.rank < spec.size; ++spec.rank) EXPECT_EQ(choose(spec), first);
  }
}

TEST(Choose, TakesTheRequestedAlgorithmIfSupported) {
  CollectiveSpec spec{.collective = Collective::kAllToAll, .size = 8, .count = 1 << 20};
  spec.algorithm = find_algorithm(Collective::kAllToAll, "bruck");
  EXPECT_STREQ(choose(spec)->name, "bruck");
  spec.counts = spec.receive_counts = std::vector<size_t>(8, 1);
  EXPECT_STREQ(choose(spec)->name, "pairwise") << "bruck's blocks are equal";
  spec.collective = Collective::kBarrier;
  EXPECT_STREQ(choose(spec)->name, "dissemination");
}

TEST(Choose, TakesFewMessagesForSmallTensorsAndFewBytesForLarge) {
  const auto chosen = [](Collective collective, size_t bytes) { return choose(spec_of(collective, 16, bytes))->name; };
  EXPECT_STREQ(chosen(Collective::kAllReduce, 8), "recursive_doubling");
  EXPECT_STRNE(chosen(Collective::kAllReduce, 64 << 20), "recursive_doubling");
  EXPECT_STREQ(chosen(Collective::kBroadcast, 8), "binomial");
  EXPECT_STRNE(chosen(Collective::kBroadcast, 64 << 20), "binomial");
  EXPECT_STREQ(chosen(Collective::kAllToAll, 64), "bruck");
  EXPECT_STREQ(chosen(Collective::kAllToAll, 64 << 20), "pairwise");
}

TEST(Predict, CountsTurnsWhereRanksOutnumberCores) {
  CollectiveSpec spec = spec_of(Collective::kAllReduce, 8, 1 << 20);
  const Algorithm& ring = algorithm(Collective::kAllReduce, "ring");
  const double alone = predict(spec, ring);
  spec.costs.load = 4;
  EXPECT_GT(predict(spec, ring), 2 * alone);
}

TEST(Evaluate, AddsUpTheCostOfABroadcastToOneRank) {
  CollectiveSpec spec = spec_of(Collective::kBroadcast, 2, 1000);
  spec.costs = {.link = {.latency = 10, .overhead = 1, .bytes_per_second = 1000}, .reduce_bytes_per_second = 1e12};
  // The root sends (1 + 1), the bytes travel (10), and the other rank receives them (1 + 1).
  EXPECT_NEAR(evaluated(algorithm(Collective::kBroadcast, "binomial"), spec), 14, 1e-6);
  spec.costs.load = 3;
  EXPECT_NEAR(evaluated(algorithm(Collective::kBroadcast, "binomial"), spec), 22, 1e-6);
}

}  // namespace
}  // namespace muster::test
