#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <map>
#include <nlohmann/json.hpp>

#include "group/ranks.h"
#include "muster/flight/recorder_reader.h"
#include "muster/steps/step_recorder.h"
#include "muster/steps/step_report.h"
#include "muster/steps/step_stragglers.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kMiB = 1 << 20;

TimePoint at(double milliseconds) { return TimePoint{1'000'000'000 + static_cast<int64_t>(milliseconds * 1e6)}; }

/// Times of the first gradient, the last gradient, the begin and the end of the reduction, in milliseconds after the
/// begin of forward. `last` is the parameter whose gradient arrived last.
BucketTimes bucket(double first, double ready, double begun, double ended, size_t last) {
  return {at(first), at(ready), at(begun), at(ended), last};
}

/// The report of iteration 7: forward from 0 to 50 ms, then backward until `backward_ends`.
StepReport report(double backward_ends, double ends, std::vector<BucketTimes> buckets,
                  std::vector<std::vector<size_t>> plan, std::vector<size_t> bytes) {
  BackwardTimes times{7, at(0), at(50), at(backward_ends), at(ends), std::move(buckets)};
  return step_report(std::move(times), {"body.0", "body.1", "body.2", "head"}, plan, bytes);
}

TEST(StepReport, ComputesTheOverlapOfCommunication) {
  const StepReport step = report(100, 110, {bucket(50, 60, 60, 80, 3), bucket(60, 100, 100, 110, 0)}, {{3}, {2, 1, 0}},
                                 {20 * kMiB, 10 * kMiB});
  EXPECT_EQ(step.communication, 30ms);
  EXPECT_EQ(step.exposed, 10ms);
  EXPECT_NEAR(step.overlap_ratio(), 2.0 / 3, 1e-9);
  EXPECT_THAT(step.to_string(), HasSubstr("step 7: forward 50.0 ms, backward 50.0 ms, then 10.0 ms of waiting; "
                                          "30.0 ms of communication, 67 % of it overlapped"));
  EXPECT_THAT(step.to_string(), HasSubstr("body.2 ... body.0 (3) (body.0)"));
}

TEST(StepReport, CountsAQueuedReductionFromItsTurn) {
  const StepReport step =
      report(70, 110, {bucket(50, 60, 60, 100, 3), bucket(60, 70, 70, 110, 0)}, {{3}, {0}}, {40 * kMiB, 10 * kMiB});
  EXPECT_EQ(step.communication, 50ms);
  EXPECT_EQ(step.buckets[1].reduction(), 10ms);
}

TEST(StepReport, OverlapIsOneWithoutCommunication) { EXPECT_EQ(StepReport{}.overlap_ratio(), 1); }

TEST(StepReport, HasNoBucketsWhenThePlanHasChangedSince) {
  EXPECT_THAT(report(100, 101, {bucket(50, 60, 60, 80, 3)}, {{3}, {0}}, {kMiB, kMiB}).buckets, IsEmpty());
}

TEST(StepAdvice, SplitsTheBucketThatKeptCommunicationIdle) {
  // Bucket 0 fills during 40 of 50 ms, and both buckets are reduced after that.
  const StepReport step = report(100, 150, {bucket(50, 90, 90, 130, 3), bucket(90, 100, 100, 150, 0)}, {{2, 3}, {0, 1}},
                                 {20 * kMiB, 15 * kMiB});
  EXPECT_THAT(step.advice, ElementsAre(HasSubstr("communication (60.0 ms) takes longer than backward (50.0 ms)"),
                                       "bucket 0 waits 40.0 ms for layer `head`: lower bucket_cap_mb to 10"));
}

TEST(StepAdvice, SplitsTheBucketThatFillsLast) {
  const StepReport step = report(100, 120, {bucket(50, 60, 60, 62, 3), bucket(60, 100, 100, 120, 0)}, {{3}, {0, 1, 2}},
                                 {5 * kMiB, 50 * kMiB});
  EXPECT_THAT(step.advice,
              ElementsAre("20.0 ms of the wait is for the last bucket (50.0 MiB), which fills when backward "
                          "ends: lower bucket_cap_mb to 25"));
}

TEST(StepAdvice, NamesTheLayerThatIsOutOfOrder) {
  const StepReport step =
      report(100, 110, {bucket(50, 98, 98, 103, 3), bucket(51, 60, 98, 109, 0)}, {{3}, {0}}, {5 * kMiB, 6 * kMiB});
  EXPECT_THAT(step.advice,
              ElementsAre(HasSubstr("bucket 1 was full 38.0 ms before its turn, which bucket 0 held up for "
                                    "layer `head`")));
}

TEST(StepAdvice, RefersToStragglersWhenReductionsWaited) {
  const StepReport step = report(100, 140, {bucket(50, 60, 60, 62, 3), bucket(60, 100, 100, 140, 0)}, {{3}, {0, 1}},
                                 {10 * kMiB, 10 * kMiB});
  EXPECT_THAT(step.advice,
              ElementsAre(HasSubstr("38.0 ms of the reductions' time was spent waiting for another rank")));
}

TEST(StepAdvice, CountsSmallBuckets) {
  std::vector<BucketTimes> buckets;
  std::vector<std::vector<size_t>> plan;
  for (int i = 0; i < 10; ++i) {
    buckets.push_back(bucket(50 + i, 51 + i, 51 + i, 60 + 2 * i, 0));
    plan.push_back({0});
  }
  const StepReport step = report(62, 78, std::move(buckets), plan, std::vector<size_t>(10, 1000));
  EXPECT_THAT(step.advice, ::testing::Contains(HasSubstr("10 of 10 buckets are smaller than 0.25 MiB")));
}

TEST(StepAdvice, IsEmptyForShortWaits) {
  EXPECT_THAT(
      report(100, 100.5, {bucket(50, 60, 60, 62, 3), bucket(60, 100, 100, 100.5, 0)}, {{3}, {0, 1}}, {kMiB, 25 * kMiB})
          .advice,
      IsEmpty());
}

TEST(StepRecorder, ShowsStepsInTracesAndInTheHistory) {
  StepRecorder recorder({3, 4, "training", 0});
  BackwardTimes times{7, at(0), at(50), at(100), at(110), {bucket(50, 60, 61, 80, 3), bucket(60, 70, 70, 110, 0)}};
  times.buckets.push_back({{}, {}, at(110), at(110.5), 0});  // unused
  recorder.set_plan({"a", "b", "c", "head", "rest"}, {{3, 2}, {1, 0}, {4}});
  recorder.add(times, {kMiB, 10 * kMiB, 5});
  EXPECT_EQ(recorder.history().count(), 1U);
  EXPECT_FLOAT_EQ(recorder.history().step(1).backward, 0.05F);

  const auto trace = nlohmann::json::parse(to_trace(recordings_of(getpid())));
  EXPECT_EQ(trace["otherData"]["begin_monotonic_ns"], at(0).ns);
  std::map<int, std::string> tracks;
  std::vector<std::string> slices, plan;
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "thread_name") tracks[event["tid"]] = event["args"]["name"];
    if (event["ph"] != "X") continue;
    slices.push_back(fmt::format("{}: {} {}+{}", tracks[event["tid"]], event["name"].get<std::string>(),
                                 event["ts"].get<double>(), event["dur"].get<double>()));
    if (event["name"] != "reduction") continue;
    plan.push_back(event["args"]["parameters"].dump() + " by " + event["args"]["filled by"].get<std::string>());
  }
  EXPECT_THAT(plan, ElementsAre(R"(["head","c"] by head)", R"(["b","a"] by a)", R"(["rest"] by )"));
  const std::string group = "group training, rank 3, ";
  EXPECT_THAT(slices, ElementsAre(group + "training: forward 0+50000", group + "training: backward 50000+50000",
                                  group + "training: waiting for reductions 100000+10000",
                                  group + "bucket 0: gradients 50000+10000", group + "bucket 0: queued 60000+1000",
                                  group + "bucket 0: reduction 61000+19000", group + "bucket 1: gradients 60000+10000",
                                  group + "bucket 1: queued 70000+10000", group + "bucket 1: reduction 80000+30000",
                                  group + "bucket 2: reduction 110000+500"));
}

TEST(Stragglers, AreTheRanksThatWaitLeast) {
  std::vector<std::vector<StepTimes>> steps(4);
  for (int step = 0; step < 100; ++step) {
    for (int rank = 0; rank < 4; ++rank) {
      const bool late = rank == (step < 82 ? 3 : 1);
      steps[rank].push_back({0.001F, 0.05F, late ? 0.105F : 0.1F, late ? 0.001F : 0.006F + 0.001F * rank});
    }
  }
  const StragglerReport report = compare(steps);
  EXPECT_EQ(report.slowest_rank(), 3);
  EXPECT_EQ(report.ranks[3].last, 82U);
  EXPECT_EQ(report.ranks[1].last, 18U);
  EXPECT_TRUE(report.is_significant());
  EXPECT_EQ(report.to_string(),
            "rank 3 was last in 82 % of 100 steps, by 5.00 ms on average; its backward takes 4.10 ms longer than the "
            "others'");
}

TEST(Stragglers, AreNotSignificantWhereRanksTakeTurns) {
  std::vector<std::vector<StepTimes>> steps(2);
  for (int step = 0; step < 100; ++step) {
    steps[step % 2].push_back({0.001F, 0.05F, 0.1F, 0.001F});
    steps[1 - step % 2].push_back({0.001F, 0.05F, 0.1F, 0.02F});
  }
  EXPECT_FALSE(compare(steps).is_significant());
  EXPECT_THAT(compare(steps).to_string(), HasSubstr("no rank is significantly slower"));
  EXPECT_EQ(compare({steps[0]}).to_string(), "there is a single rank: no rank waits");
  EXPECT_EQ(compare({{}, {}}).to_string(), "no step has been reduced yet");
}

/// A history of `steps` steps in which rank 1's gradients are ready 5 ms after those of rank 0.
StepHistory history_of(Rank rank, int steps) {
  StepHistory history;
  for (int i = 0; i < steps; ++i) {
    const double begin = 200.0 * i;
    history.add(at(begin), at(begin + 50), at(begin + (rank == 1 ? 105 : 100)), at(begin + 110));
  }
  return history;
}

TEST(Stragglers, AreFoundFromTheHistoriesOfAllRanks) {
  test::run_group(2, "shm", [](Group& group) {
    for (int steps : {0, 3, 50, 3000}) {
      const auto report = find_stragglers(group, history_of(group.membership().rank, steps), 40);
      ASSERT_TRUE(report) << report.error().to_string();
      EXPECT_EQ(report->steps, std::min(steps, 40));
      if (steps == 0) continue;
      EXPECT_EQ(report->slowest_rank(), 1);
      EXPECT_EQ(report->ranks[1].last, report->steps);
      EXPECT_NEAR(report->ranks[1].lag, 0.005, 1e-6);
      EXPECT_NEAR(report->ranks[1].excess.backward, 0.005, 1e-6);
    }
    const auto all = find_stragglers(group, history_of(group.membership().rank, 3000), 1 << 20);
    EXPECT_EQ(all->steps, StepHistory::kSteps);
  });
}

TEST(Stragglers, NeedTheSameStepAtAllRanks) {
  test::run_group(2, "shm", [](Group& group) {
    const Rank rank = group.membership().rank;
    const auto report = find_stragglers(group, history_of(rank, 3 + rank), 10);
    ASSERT_FALSE(report);
    EXPECT_EQ(report.error().message,
              fmt::format("rank {} has reduced {} steps and this rank {}: ask for the report at "
                          "all ranks after the same step",
                          1 - rank, 4 - rank, 3 + rank));
  });
}

}  // namespace
}  // namespace muster
