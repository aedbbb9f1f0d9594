// Compares the plan of each shared-memory form with the steps that the form really takes.
#include "muster/collective/host/host_plan.h"

#include <gtest/gtest.h>

#include <cmath>

#include "collective/host_trial.h"
#include "muster/shm/cpu_migrator.h"

namespace muster::test {
namespace {

constexpr Collective kAll[] = {Collective::kAllReduce, Collective::kReduce,   Collective::kReduceScatter,
                               Collective::kBroadcast, Collective::kScatter,  Collective::kAllGather,
                               Collective::kGather,    Collective::kAllToAll, Collective::kBarrier};

HostPlanInputs question_of(const HostCommCase& trial, int ranks) {
  return {.collective = trial.collective,
          .bytes = trial.count * size_of(trial.dtype),
          .ranks = ranks,
          .cores = usable_cores(),
          .element = size_of(trial.dtype)};
}

/// Runs one call and returns the number of its steps.
uint32_t steps_of(HostCommRanks& ranks, HostCommCase& trial, const Provider& provider = {}) {
  ++trial.sequence;
  const uint32_t before = ranks.comm(0).step();
  EXPECT_EQ(fault_of(ranks, trial, provider), "") << to_string(trial);
  return ranks.comm(0).step() - before;
}

class HostPlanOf : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HostPlanOf, testing::Values(2, 3, 8, 18), testing::PrintToStringParamName());

TEST_P(HostPlanOf, CountsAWaitForEachStep) {
  HostCommRanks ranks(GetParam());
  HostCommCase trial;
  for (const size_t count :
       {size_t{1}, size_t{4}, size_t{11}, size_t{4096}, size_t{4097}, size_t{33000}, size_t{131073}}) {
    if (count > 100'000 && ranks.size() > 3) continue;  // this count only matters for a few ranks
    for (const Collective collective : kAll) {
      trial.collective = collective;
      trial.count = count;
      const HostPlan plan = plan_on_host(question_of(trial, ranks.size()));
      EXPECT_EQ(steps_of(ranks, trial), plan.waits) << to_string(trial) << ": " << plan.form;
    }
  }
}

/// An all_to_all in which only the root receives. Hierarchy uses it to gather the shards of a reduce.
TEST_P(HostPlanOf, CountsAnExchangeThatOnlyTheRootReceives) {
  HostCommRanks ranks(GetParam());
  const int size = ranks.size();
  for (const size_t count : {size_t{1}, size_t{3000}, size_t{33000}}) {
    HostPlanInputs question{.collective = Collective::kAllToAll, .bytes = count * 4, .ranks = size, .to_root = true};
    question.cores = usable_cores();
    ranks.run([&](Rank rank, HostComm& comm) {
      std::vector<int32_t> own(count), all(rank == 0 ? count * size : 0);
      Operation operation;
      operation.call = {.collective = Collective::kAllToAll, .dtype = Dtype::kInt32, .layout = 1, .sequence = count};
      operation.counts.assign(size, 0);
      operation.counts[0] = count;
      operation.receive_counts.assign(size, rank == 0 ? count : 0);
      operation.input = {own.data(), own.size(), Dtype::kInt32};
      operation.output = {all.data(), all.size(), Dtype::kInt32};
      const uint32_t before = comm.step();
      ASSERT_TRUE(run_on_host(comm, operation, Deadline::after(std::chrono::seconds(60))));
      EXPECT_EQ(comm.step() - before, plan_on_host(question).waits) << count << " elements";
    });
  }
}

TEST_P(HostPlanOf, MarksZeroCopyMoves) {
  HostCommRanks ranks(GetParam());
  ranks.use_arenas();
  ArenaBlocks held(ranks);  // keeps the arenas in use from the first call on
  for (Rank rank = 0; rank < ranks.size(); ++rank) held(rank, 1);
  HostCommCase trial;
  for (const size_t count : {size_t{100}, size_t{2047}, size_t{2048}, size_t{33000}}) {
    for (const Collective collective : kAll) {
      trial.collective = collective;
      trial.count = count;
      HostPlanInputs question = question_of(trial, ranks.size());
      question.direct = goes_direct(question);
      uint32_t steps = 0;
      for (int call = 0; call < 3; ++call) {  // a segment that is new to the other ranks costs an additional step
        ArenaBlocks blocks(ranks);
        steps = steps_of(ranks, trial, [&](Rank rank, size_t bytes) { return blocks(rank, bytes); });
      }
      EXPECT_EQ(steps, plan_on_host(question).waits) << to_string(trial) << (question.direct ? ", direct" : "");
    }
  }
}

TEST(HostPlan, NamesTheFormAndItsMoves) {
  const auto plan = [](size_t bytes, int ranks, int cores, bool direct = false) {
    return plan_on_host({.bytes = bytes, .ranks = ranks, .cores = cores, .direct = direct});
  };
  EXPECT_EQ(plan(kStepPayload, 2, 2).form, "inline payload");
  EXPECT_EQ(plan(kStepPayload + 4, 2, 2).form, "one shot");
  EXPECT_EQ(plan(kHostOneShotOfTwo, 2, 2).form, "one shot");
  EXPECT_EQ(plan(kHostOneShotOfTwo + 4, 2, 2).form, "two shots");
  EXPECT_EQ(plan(kHostOneShot, 4, 4).form, "one shot");
  EXPECT_EQ(plan(kHostOneShot + 4, 4, 4).form, "two shots");
  EXPECT_EQ(plan(8, 64, 4).form, "through the leader");
  EXPECT_EQ(plan(8, 64, 64).form, "inline payload");
  const HostPlan large = plan(1 << 20, 4, 4);
  EXPECT_EQ(large.chunk, kHostChunk);
  EXPECT_EQ(large.waits, 9);
  EXPECT_EQ(large.copied, 3 * 0.75 * (1 << 20)) << "in, out, and what is read to be combined";
  EXPECT_EQ(plan(1 << 20, 4, 4, true).waits, 2);
  EXPECT_LT(plan(1 << 20, 4, 4, true).copied, large.copied);
}

TEST(HostPlan, CostIsTheSumOfItsParts) {
  MachineCosts machine;
  machine.memory = {.wait = 1, .turn = 50, .cached_bytes_per_second = 4, .bytes_per_second = 1};
  machine.reduce_bytes_per_second = 8;
  HostPlanInputs question{.ranks = 3, .cores = 4};
  HostPlan plan{.waits = 2, .awaited = 2, .copied = 8, .combined = 16, .tensors = 100};
  EXPECT_EQ(predict(plan, question, machine), 2 * 2 + 8 / 4 + 16 / 8);
  plan.tensors = 2 * kUncachedTensors;
  EXPECT_EQ(predict(plan, question, machine), 2 * 2 + 8 + 16 / 8) << "no cache holds these";
  plan.tensors = std::sqrt(kCachedTensors * kUncachedTensors);
  EXPECT_NEAR(predict(plan, question, machine), 2 * 2 + 8 / 2 + 16 / 8, 1e-9) << "half way";
  plan.tensors = 100;
  question.cores = 1;
  EXPECT_EQ(predict(plan, question, machine), 2 * 3 * 50 + 3 * (8 / 4 + 16 / 8)) << "three take turns";
}

}  // namespace
}  // namespace muster::test
