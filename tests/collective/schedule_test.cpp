#include "muster/collective/algorithms/algorithms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "collective/adversarial_runner.h"

namespace muster::test {
namespace {

std::string run(const Algorithm& algorithm, const Setting& setting) {
  Trial trial(algorithm, setting);
  AdversarialRunner runner(trial, setting.seed);
  runner.start_all();
  runner.run();
  return runner.fault();
}

class EverySchedule : public testing::TestWithParam<Algorithm> {};

TEST_P(EverySchedule, MatchesItsDefinitionOnOneToSixtyFourRanks) {
  for (int size = 1; size <= 64; ++size) {
    for (const size_t count : boundary_counts(size)) {
      if (count >= 1000 && size > 6) continue;
      // For many ranks only one count is tested: more elements than ranks for a tensor, and few elements for blocks.
      const size_t tested_count = has_blocks(GetParam().collective) ? 2 : static_cast<size_t>(size) + 1;
      if (size > 16 && count != tested_count) continue;
      const auto seed = static_cast<uint64_t>(size * 100000) + count;
      ASSERT_EQ(run(GetParam(), {.size = size,
                                 .count = count,
                                 .root = static_cast<Rank>(seed % size),
                                 .in_place = seed % 2 == 0,
                                 .seed = seed}),
                "");
    }
  }
}

TEST_P(EverySchedule, SupportsBlocksOfAnyLength) {
  for (int size = 1; size <= 64; ++size) {
    for (const size_t count : {1, size > 24 ? 3 : 10}) {
      const auto seed = static_cast<uint64_t>(size) + count;
      ASSERT_EQ(run(GetParam(), {.size = size,
                                 .count = count,
                                 .chunk_bytes = 64,
                                 .in_place = seed % 2 == 0,
                                 .uneven = true,
                                 .seed = seed}),
                "");
    }
  }
}

TEST_P(EverySchedule, CutsLargeMessagesIntoChunksOfAnySize) {
  for (int size = 1; size <= 9; ++size) {
    for (const size_t chunk : {0, 24, 100, 4096}) {
      for (const bool in_place : {false, true}) {
        ASSERT_EQ(run(GetParam(), {.size = size,
                                   .count = 133,
                                   .root = size / 2,
                                   .chunk_bytes = chunk,
                                   .in_place = in_place,
                                   .uneven = chunk == 100,
                                   .seed = chunk + size}),
                  "");
      }
    }
  }
}

TEST_P(EverySchedule, GivesEveryRankTheSameFloat32Bits) {
  for (const int size : {2, 3, 4, 5, 7, 8, 13, 16, 33}) {
    for (const size_t count : {1, 17, 200}) {
      ASSERT_EQ(run(GetParam(), {.size = size, .count = count, .dtype = Dtype::kFloat32, .chunk_bytes = 64}), "");
    }
  }
}

TEST_P(EverySchedule, WorksWithEveryRoot) {
  for (int size = 1; size <= 17; ++size) {
    for (Rank root = 0; root < size; ++root) {
      for (const bool in_place : {false, true}) {
        ASSERT_EQ(run(GetParam(), {.size = size, .count = 10, .root = root, .in_place = in_place, .seed = 7}), "");
      }
    }
  }
}

TEST_P(EverySchedule, IsAPureFunction) {
  const CollectiveSpec spec{.rank = 3, .size = 11, .count = 1001, .element_bytes = 4, .root = 5, .chunk_bytes = 64};
  EXPECT_EQ(to_string(GetParam().schedule(spec)), to_string(GetParam().schedule(spec)));
}

bool every_rank_waits_for_all(Collective collective) { return !has_root(collective); }

TEST_P(EverySchedule, WaitsForTheLastRank) {
  for (const int size : {2, 3, 6, 16}) {
    for (Rank late = 0; late < size; ++late) {
      Trial trial(GetParam(), {.size = size, .count = 50, .chunk_bytes = 64});
      AdversarialRunner runner(trial, 5);
      for (Rank rank = 0; rank < size; ++rank) {
        if (rank != late) runner.start(rank);
      }
      runner.run();
      for (Rank rank = 0; rank < size && every_rank_waits_for_all(GetParam().collective); ++rank) {
        ASSERT_FALSE(runner.finished(rank)) << trial.name() << ": " << rank << " did not wait for " << late;
      }
      runner.start(late);
      runner.run();
      ASSERT_EQ(runner.fault(), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, EverySchedule, testing::ValuesIn(algorithms()), parameter_name);

/// The algorithms whose number of steps is logarithmic in the number of ranks, or linear at one rank only.
const std::vector<Algorithm> kOfManyRanks = {
    algorithm(Collective::kAllReduce, "recursive_doubling"),
    algorithm(Collective::kAllReduce, "double_tree"),
    algorithm(Collective::kBroadcast, "binomial"),
    algorithm(Collective::kBroadcast, "double_tree"),
    algorithm(Collective::kBroadcast, "chain"),
    algorithm(Collective::kAllGather, "bruck"),
    algorithm(Collective::kBarrier, "dissemination"),
    algorithm(Collective::kReduce, "binomial"),
    algorithm(Collective::kScatter, "binomial"),
    algorithm(Collective::kScatter, "direct"),
    algorithm(Collective::kGather, "binomial"),
    algorithm(Collective::kGather, "direct"),
};

class LogarithmicSchedule : public testing::TestWithParam<Algorithm> {};

TEST_P(LogarithmicSchedule, WorksOnThousandsOfRanks) {
  for (const int size : {1000, 4096}) {
    const Setting setting{.size = size,
                          .count = 1,
                          .dtype = reduces(GetParam().collective) ? Dtype::kUint64 : Dtype::kUint8,
                          .root = size / 3};
    ASSERT_EQ(run(GetParam(), setting), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, LogarithmicSchedule, testing::ValuesIn(kOfManyRanks), parameter_name);

size_t sent_bytes(const Schedule& schedule) {
  size_t bytes = 0;
  for (const Step& step : schedule.steps) bytes += step.kind == Step::Kind::kSend ? step.from.bytes : 0;
  return bytes;
}

size_t receiving_rounds(const Schedule& schedule) {
  return std::count_if(schedule.steps.begin(), schedule.steps.end(),
                       [](const Step& step) { return step.kind == Step::Kind::kReceive; });
}

TEST(RingAllReduce, SendsNoMoreThanTheBandwidthBound) {
  for (const int size : {2, 3, 8, 64}) {
    const size_t count = static_cast<size_t>(size) * 1000;
    for (Rank rank = 0; rank < size; ++rank) {
      const Schedule schedule = ring_all_reduce({.rank = rank, .size = size, .count = count, .element_bytes = 4});
      EXPECT_EQ(sent_bytes(schedule), 2 * (count - count / size) * 4);
    }
  }
}

TEST(RingAllReduce, NeedsScratchForChunksOnly) {
  const Schedule schedule = ring_all_reduce({.size = 2, .count = 1 << 24, .element_bytes = 4, .chunk_bytes = 1 << 18});
  EXPECT_EQ(schedule.scratch_bytes, size_t{2} << 18);
}

TEST(BruckAllGather, TakesLogarithmicallyManyRounds) {
  for (int size = 2; size <= 300; ++size) {
    const Schedule schedule = bruck_all_gather({.rank = size / 2, .size = size, .count = 3, .element_bytes = 2});
    const size_t rounds = std::bit_width(static_cast<unsigned>(size - 1));
    EXPECT_GE(receiving_rounds(schedule), rounds);
    EXPECT_LE(receiving_rounds(schedule), 2 * rounds) << "a message wraps around the end at most once";
    EXPECT_EQ(sent_bytes(schedule), static_cast<size_t>(size - 1) * 6);
    EXPECT_EQ(schedule.scratch_bytes, 0U);
  }
}

TEST(DisseminationBarrier, SendsOneBytePerRound) {
  for (int size = 2; size <= 300; ++size) {
    const Schedule schedule = dissemination_barrier({.rank = 1, .size = size});
    EXPECT_EQ(sent_bytes(schedule), static_cast<size_t>(std::bit_width(static_cast<unsigned>(size - 1))));
  }
}

TEST(ToString, NamesEachStepOnALine) {
  const Schedule schedule = recursive_doubling_all_reduce({.rank = 1, .size = 2, .count = 2, .element_bytes = 4});
  EXPECT_EQ(to_string(schedule),
            "0: send input[0, 8) to 0\n"
            "1: receive scratch[0, 8) from 0\n"
            "2: reduce scratch[0, 8) op input[0, 8) -> output[0, 8) after 1 and 0\n");
}

}  // namespace
}  // namespace muster::test
