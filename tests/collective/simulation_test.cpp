// Every collective over simulated links, with delays, drops, split deliveries and crashes. A failure prints its seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "base/environment.h"
#include "collective/simulated_ranks.h"
#include "muster/base/random.h"

namespace muster::test {
namespace {

sim::Faults rough() { return {.short_read = 0.3, .drop = 0.01}; }

std::string simulate(const Algorithm& algorithm, const Setting& setting, sim::Faults faults = rough()) {
  Trial trial(algorithm, setting);
  sim::World world(setting.seed, faults);
  SimulatedRanks ranks(trial, world);
  ranks.start_all(200us, setting.seed);
  if (const Result<> ended = ranks.run(); !ended) return trial.name() + ": " + ended.error().to_string();
  for (Rank rank = 0; rank < trial.size(); ++rank) {
    if (!ranks.result(rank)) return trial.name() + ": " + ranks.result(rank).error().to_string();
  }
  return trial.fault();
}

class EveryCollective : public testing::TestWithParam<Algorithm> {};

TEST_P(EveryCollective, WorksOnOneToSixtyFourSimulatedRanks) {
  for (int size = 1; size <= 64; ++size) {
    const auto counts = boundary_counts(size);
    const auto seed = static_cast<uint64_t>(size);
    ASSERT_EQ(simulate(GetParam(), {.size = size,
                                    .count = counts[seed % 7],
                                    .root = size / 2,
                                    .chunk_bytes = 256,
                                    .in_place = size % 3 != 0,
                                    .uneven = size % 5 == 0,
                                    .segments = size % 2 == 0,
                                    .seed = seed}),
              "");
  }
}

TEST_P(EveryCollective, WorksUnderRandomDelays) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Random random(seed);
    const int size = static_cast<int>(random.between(2, 9));
    const sim::Faults faults{.min_delay = Duration(1),
                             .max_delay = Duration(random.between(2, 2'000'000)),
                             .bytes_per_second = random.chance(0.5) ? 1e6 : 1e10,
                             .short_read = random.uniform(),
                             .drop = random.uniform() / 2};
    ASSERT_EQ(simulate(GetParam(),
                       {.size = size,
                        .count = random.below(2000),
                        .dtype = reduces(GetParam().collective) ? Dtype::kFloat32 : Dtype::kUint8,
                        .root = static_cast<Rank>(random.below(size)),
                        .chunk_bytes = random.below(1000),
                        .in_place = random.chance(0.5),
                        .uneven = random.chance(0.3),
                        .segments = random.chance(0.5),
                        .seed = seed},
                       faults),
              "");
  }
}

TEST_P(EveryCollective, CarriesMoreThanALinkHolds) {
  ASSERT_EQ(simulate(GetParam(), {.size = 3, .count = (5 << 20) / 8 + 1, .root = 1, .chunk_bytes = 200'000}), "");
}

// The number of events of a run without a crash. A crash can then be placed at any point of the run.
uint64_t events_of(const Algorithm& algorithm, const Setting& setting) {
  Trial trial(algorithm, setting);
  sim::World world(setting.seed, rough());
  SimulatedRanks ranks(trial, world);
  ranks.start_all(200us, setting.seed);
  EXPECT_TRUE(ranks.run().has_value());
  return world.events();
}

/// A run that is interrupted before its event number `when`.
struct Interrupted {
  Interrupted(const Algorithm& algorithm, const Setting& setting, uint64_t when)
      : trial(algorithm, setting), world(setting.seed, rough()), ranks(trial, world) {
    ranks.start_all(200us, setting.seed);
    while (world.events() < when && world.step()) {
    }
  }

  /// Runs until all ranks that have not crashed have ended. A rank that succeeds must have the right result. A rank
  /// that fails must blame one of `culprits`, and is counted in `victims`.
  void expect_end(const std::vector<Rank>& culprits, int& victims) {
    ASSERT_TRUE(ranks.run().has_value()) << trial.name() << ": a survivor of " << culprits[0] << " hangs";
    for (Rank rank = 0; rank < trial.size(); ++rank) {
      if (ranks.crashed(rank)) continue;
      if (ranks.result(rank)) {
        ASSERT_EQ(trial.fault_of(rank), "");
        continue;
      }
      ++victims;
      const Error& error = ranks.result(rank).error();
      ASSERT_EQ(error.code, ErrorCode::kPeerLost) << trial.name() << ": " << error.to_string();
      ASSERT_TRUE(std::ranges::count(culprits, error.rank))
          << trial.name() << ": rank " << rank << " blames another: " << error.to_string();
    }
  }

  Trial trial;
  sim::World world;
  SimulatedRanks ranks;
};

void expect_end_after_crash(const Algorithm& algorithm, const Setting& setting, uint64_t when, Rank dead,
                            int& victims) {
  Interrupted run(algorithm, setting, when);
  run.ranks.crash(dead);
  run.expect_end({dead}, victims);
}

/// Stops the rank until the other ranks can do nothing more, then resumes it. All results must be right.
void expect_results_after_stop(const Algorithm& algorithm, const Setting& setting, uint64_t when, Rank stopped) {
  Interrupted run(algorithm, setting, when);
  run.world.stop(stopped);
  while (run.world.step()) {
  }
  run.world.resume(stopped);
  int victims = 0;
  ASSERT_NO_FATAL_FAILURE(run.expect_end({stopped}, victims));
  ASSERT_EQ(victims, 0) << "a rank failed because " << stopped << " was slow";
}

void expect_end_after_partition(const Algorithm& algorithm, const Setting& setting, uint64_t when, Rank a, Rank b,
                                int& victims) {
  Interrupted run(algorithm, setting, when);
  run.world.partition(a, b);
  run.expect_end({a, b}, victims);
}

void expect_results_after_healing(const Algorithm& algorithm, const Setting& setting, uint64_t when, Rank a, Rank b) {
  Interrupted run(algorithm, setting, when);
  run.world.partition(a, b);
  run.world.at(run.world.clock().now() + 50ms, [&] { run.world.heal(a, b); });
  int victims = 0;
  ASSERT_NO_FATAL_FAILURE(run.expect_end({a, b}, victims));
  ASSERT_EQ(victims, 0) << "a rank failed though " << a << " and " << b << " were soon reached again";
}

/// A crash, stop or partition of a rank before a given event of a run.
struct Incident {
  Setting setting;
  uint64_t when;
  Rank rank;
};

Incident drawn(const Algorithm& algorithm, uint64_t seed) {
  Random random(seed);
  const int size = static_cast<int>(random.between(2, 12));
  const Setting setting{.size = size, .count = random.between(1, 500), .chunk_bytes = 128, .seed = seed};
  const uint64_t when = random.below(events_of(algorithm, setting));
  return {setting, when, static_cast<Rank>(random.below(size))};
}

TEST_P(EveryCollective, EndsAtEverySurvivorWhenARankCrashes) {
  int victims = 0;
  const uint64_t first = test::from_environment("MUSTER_SEED", 1),
                 rounds = test::from_environment("MUSTER_ROUNDS", 100);
  for (uint64_t seed = first; seed < first + rounds; ++seed) {
    const auto [setting, when, dead] = drawn(GetParam(), seed);
    ASSERT_NO_FATAL_FAILURE(expect_end_after_crash(GetParam(), setting, when, dead, victims));
  }
  EXPECT_TRUE(victims > 0 || rounds < 100) << "no crash came in time";
}

TEST_P(EveryCollective, IsRightOrEndsWhenARankIsStoppedOrCutOff) {
  int victims = 0;
  const uint64_t first = test::from_environment("MUSTER_SEED", 1), rounds = test::from_environment("MUSTER_ROUNDS", 30);
  for (uint64_t seed = first; seed < first + rounds; ++seed) {
    const auto [setting, when, one] = drawn(GetParam(), seed);
    const Rank other = (one + 1) % setting.size;
    ASSERT_NO_FATAL_FAILURE(expect_results_after_stop(GetParam(), setting, when, one));
    ASSERT_NO_FATAL_FAILURE(expect_end_after_partition(GetParam(), setting, when, one, other, victims));
    ASSERT_NO_FATAL_FAILURE(expect_results_after_healing(GetParam(), setting, when, one, other));
  }
  EXPECT_TRUE(victims > 0 || rounds < 30) << "no partition came in time";
}

TEST_P(EveryCollective, SurvivesAFaultAtEachEventOfASmallRun) {
  int victims = 0;
  for (const int size : {2, 3, 4}) {
    const Setting setting{.size = size, .count = 5, .chunk_bytes = 16, .seed = static_cast<uint64_t>(size)};
    const uint64_t events = events_of(GetParam(), setting);
    for (uint64_t when = 0; when < events; ++when) {
      for (Rank rank = 0; rank < size; ++rank) {
        const Rank next = (rank + 1) % size;
        ASSERT_NO_FATAL_FAILURE(expect_end_after_crash(GetParam(), setting, when, rank, victims));
        ASSERT_NO_FATAL_FAILURE(expect_results_after_stop(GetParam(), setting, when, rank));
        ASSERT_NO_FATAL_FAILURE(expect_end_after_partition(GetParam(), setting, when, rank, next, victims));
        ASSERT_NO_FATAL_FAILURE(expect_results_after_healing(GetParam(), setting, when, rank, next));
      }
    }
  }
  EXPECT_GT(victims, 0);
}

TEST_P(EveryCollective, WorksOnHundredsOfSimulatedRanks) {
  for (const int size : {65, 100, 128, 511}) {
    if (GetParam().collective == Collective::kAllToAll && size > 128) continue;  // needs a link for each pair of ranks
    // In a single tensor, every rank's part has one or two elements.
    const size_t count = has_blocks(GetParam().collective) ? 1 : static_cast<size_t>(size) + 1;
    const Setting setting{.size = size,
                          .count = count,
                          .dtype = Dtype::kUint8,
                          .root = size / 3,
                          .in_place = size % 2 == 0,
                          .seed = static_cast<uint64_t>(size)};
    ASSERT_EQ(simulate(GetParam(), setting), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, EveryCollective, testing::ValuesIn(algorithms()), parameter_name);

class EveryReduction : public testing::TestWithParam<Algorithm> {};

TEST_P(EveryReduction, RoundsHalfSumsNoMoreThanDocumented) {
  for (const Dtype dtype : {Dtype::kFloat16, Dtype::kBfloat16}) {
    for (int size = 2; size <= 64; size += size < 10 ? 1 : 9) {
      const Setting setting{.size = size,
                            .count = 201,
                            .dtype = dtype,
                            .root = size / 2,
                            .chunk_bytes = 64,
                            .segments = size % 2 == 0,
                            .seed = static_cast<uint64_t>(size)};
      ASSERT_EQ(simulate(GetParam(), setting), "");
    }
  }
}

std::vector<Algorithm> reductions() {
  std::vector<Algorithm> found;
  for (const Algorithm& algorithm : algorithms()) {
    if (reduces(algorithm.collective)) found.push_back(algorithm);
  }
  return found;
}

INSTANTIATE_TEST_SUITE_P(All, EveryReduction, testing::ValuesIn(reductions()), parameter_name);

class LogarithmicCollective : public testing::TestWithParam<Algorithm> {};

TEST_P(LogarithmicCollective, WorksOnThousandsOfSimulatedRanks) {
  // halving_doubling divides the tensor among all ranks, so it needs at least one element per rank.
  const bool halves = GetParam().name == std::string_view("halving_doubling");
  for (const int size : {1025, 4096}) {
    const Setting setting{.size = size,
                          .count = halves ? static_cast<size_t>(size) + 1 : 1,
                          .dtype = reduces(GetParam().collective) && !halves ? Dtype::kUint64 : Dtype::kUint8,
                          .root = size / 3};
    ASSERT_EQ(simulate(GetParam(), setting), "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, LogarithmicCollective,
                         testing::Values(algorithm(Collective::kAllReduce, "recursive_doubling"),
                                         algorithm(Collective::kAllReduce, "halving_doubling"),
                                         algorithm(Collective::kAllReduce, "double_tree"),
                                         algorithm(Collective::kBroadcast, "binomial"),
                                         algorithm(Collective::kAllGather, "bruck"),
                                         algorithm(Collective::kReduce, "binomial"),
                                         algorithm(Collective::kBarrier, "dissemination")),
                         parameter_name);

TEST(DisseminationBarrier, HoldsAllRanksUntilTheLastArrives) {
  for (const int size : {2, 3, 7, 16, 33}) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      Trial trial(algorithm(Collective::kBarrier, "dissemination"), {.size = size, .seed = seed});
      sim::World world(seed, rough());
      SimulatedRanks ranks(trial, world);
      const Rank last = static_cast<Rank>(seed % size);
      for (Rank rank = 0; rank < size; ++rank) {
        if (rank != last) ranks.start(rank);
      }
      while (world.step()) {
      }
      for (Rank rank = 0; rank < size; ++rank) ASSERT_FALSE(ranks.finished(rank));
      ranks.start(last);
      ASSERT_TRUE(ranks.run().has_value());
    }
  }
}

}  // namespace
}  // namespace muster::test
