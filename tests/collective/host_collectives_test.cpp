#include "muster/collective/host/host_collectives.h"

#include <gtest/gtest.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "collective/host_trial.h"
#include "muster/base/random.h"

namespace muster::test {
namespace {

constexpr Collective kAll[] = {Collective::kAllReduce, Collective::kReduce,   Collective::kReduceScatter,
                               Collective::kBroadcast, Collective::kScatter,  Collective::kAllGather,
                               Collective::kGather,    Collective::kAllToAll, Collective::kBarrier};

bool may_be_uneven(Collective collective) {
  return collective == Collective::kAllGather || collective == Collective::kReduceScatter ||
         collective == Collective::kAllToAll;
}

/// Runs every collective in a row on one host communicator: the state that one leaves behind must not disturb the next.
void check_collectives(HostCommRanks& ranks, const std::vector<size_t>& counts,
                       const std::function<void(HostCommCase&)>& vary) {
  uint64_t sequence = 0;
  for (const size_t count : counts) {
    for (const Collective collective : kAll) {
      for (const bool uneven : {false, true}) {
        if (uneven && !may_be_uneven(collective)) continue;
        HostCommCase trial;
        trial.collective = collective;
        trial.count = count;
        trial.uneven = uneven;
        trial.root = static_cast<Rank>((sequence * 7) % ranks.size());
        trial.seed = ++sequence;
        trial.sequence = sequence;
        vary(trial);
        const std::string fault = fault_of(ranks, trial);
        ASSERT_EQ(fault, "") << ranks.size() << " ranks, " << to_string(trial);
      }
    }
  }
}

class HostCommOfSize : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HostCommOfSize, testing::Values(2, 3, 5, 8, 18), testing::PrintToStringParamName());

TEST_P(HostCommOfSize, MatchesTheDefinitionsAtEverySize) {
  HostCommRanks ranks(GetParam());
  check_collectives(ranks, {0, 1, 10, 11, 4097, 33000}, [](HostCommCase&) {});
}

TEST_P(HostCommOfSize, WorksInPlace) {
  HostCommRanks ranks(GetParam());
  check_collectives(ranks, {1, 1000, 20011}, [](HostCommCase& trial) { trial.in_place = true; });
}

TEST_P(HostCommOfSize, SupportsSegmentedMemory) {
  HostCommRanks ranks(GetParam());
  check_collectives(ranks, {7, 1000, 20011}, [](HostCommCase& trial) { trial.segments = 1 + trial.seed % 4; });
}

TEST_P(HostCommOfSize, RunsManyChunksThroughSmallSlots) {
  HostCommRanks ranks(GetParam(), 8192);
  check_collectives(ranks, {3000}, [](HostCommCase& trial) { trial.dtype = Dtype::kComplex64; });
}

TEST(HostCollectives, KnowEveryDtypeAndOperation) {
  HostCommRanks ranks(3);
  uint64_t sequence = 0;
  for (int dtype = 0; dtype < kDtypeCount; ++dtype) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      if (!check_reducible(static_cast<Dtype>(dtype), static_cast<ReduceOp>(op))) continue;
      for (const Collective collective : {Collective::kAllReduce, Collective::kReduce, Collective::kReduceScatter}) {
        for (const size_t count : {3, 9001}) {
          HostCommCase trial;
          trial.collective = collective;
          trial.dtype = static_cast<Dtype>(dtype);
          trial.op = static_cast<ReduceOp>(op);
          trial.count = count;
          trial.seed = trial.sequence = ++sequence;
          ASSERT_EQ(fault_of(ranks, trial), "") << to_string(trial);
        }
      }
    }
  }
  check_collectives(ranks, {3, 40001}, [](HostCommCase& trial) {
    trial.dtype = Dtype::kFloat8E4m3fn, trial.op = ReduceOp::kSum;
    if (reduces(trial.collective)) trial.dtype = Dtype::kBfloat16;
  });
}

TEST(HostCollectives, OfManyRanksSynchronizeThroughRankZero) {
  int size = 48;
  if (const char* text = std::getenv("MUSTER_RANKS")) std::from_chars(text, text + std::strlen(text), size);
  HostCommRanks ranks(size);
  EXPECT_EQ(ranks.comm(0).has_leader(), size > 16 && size > 2 * usable_cores());
  check_collectives(ranks, {1, 100}, [](HostCommCase&) {});
}

class HostCommWithArenas : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HostCommWithArenas, testing::Values(2, 3, 5), testing::PrintToStringParamName());

// In every third trial, one rank uses ordinary memory. In every fifth trial, all memory is in segments. In both cases
// all ranks must use slots.
TEST_P(HostCommWithArenas, WorksOnTensorsWhereTheyLie) {
  HostCommRanks ranks(GetParam());
  ranks.use_arenas();
  std::vector<void*> held;  // keeps the arenas in use from the first call on
  for (Rank rank = 0; rank < ranks.size(); ++rank) held.push_back(*ranks.arena(rank).allocate(1));
  uint64_t sequence = 0;
  for (const size_t count : {100, 3000, 50001}) {
    for (const Collective collective : kAll) {
      for (int variant = 0; variant < 6; ++variant) {
        HostCommCase trial;
        trial.collective = collective;
        trial.op = variant % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAverage;
        trial.uneven = variant == 3 && may_be_uneven(collective);
        trial.in_place = variant >= 4;
        trial.count = count;
        trial.root = static_cast<Rank>(sequence % ranks.size());
        trial.seed = trial.sequence = ++sequence;
        trial.segments = sequence % 5 == 0 ? 3 : 1;
        const Rank ordinary = sequence % 3 == 0 ? static_cast<Rank>(sequence % ranks.size()) : kNoRank;
        ArenaBlocks blocks(ranks);
        const std::string fault = fault_of(ranks, trial, [&](Rank rank, size_t bytes) -> uint8_t* {
          return rank == ordinary ? nullptr : blocks(rank, bytes);
        });
        ASSERT_EQ(fault, "") << to_string(trial);
        ASSERT_TRUE(ranks.comm(0).all_direct());
      }
    }
  }
  for (Rank rank = 0; rank < ranks.size(); ++rank) ranks.arena(rank).free(held[rank]);
}

/// Simulates a rank that was stopped in the middle of a collective and then continues. Its peers have given up the
/// collective and use their tensors for other data.
TEST(HostCollectives, DoNotTouchTensorsOfTimedOutRanks) {
  for (const Collective collective : {Collective::kAllReduce, Collective::kReduce, Collective::kBroadcast}) {
    HostCommRanks ranks(2);
    ranks.use_arenas();
    constexpr size_t kCount = 100'000;
    ArenaBlocks blocks(ranks);
    std::vector<BufferView> tensors;
    for (const Rank rank : {0, 1}) tensors.emplace_back(blocks(rank, kCount * 4), kCount, Dtype::kInt32);
    const auto run = [&](Rank rank, uint64_t sequence, Duration timeout) {
      Operation operation;
      operation.call = {collective, Dtype::kInt32, ReduceOp::kSum, 1, kCount, 0, sequence};
      operation.input = operation.output = tensors[rank];
      return run_on_host(ranks.comm(rank), operation, Deadline::after(timeout));
    };
    for (const uint64_t sequence : {1, 2, 3}) {  // repeated until all ranks know that they can work in place
      ranks.run([&](Rank rank, HostComm& comm) {
        ASSERT_TRUE(run(rank, sequence, std::chrono::seconds(60)));
        Operation barrier;
        barrier.call.collective = Collective::kBarrier;
        ASSERT_TRUE(run_on_host(comm, barrier, Deadline::after(std::chrono::seconds(60))));
      });
    }
    ASSERT_TRUE(ranks.comm(0).all_direct());
    EXPECT_EQ(run(1, 4, Duration::zero()).error().code, ErrorCode::kTimeout);
    ranks.comm(1).mark_failed(1);
    const Bytes reused(kCount * 4, 7), mine(kCount * 4, 1);
    tensors[1].write(0, reused.data(), reused.size());
    tensors[0].write(0, mine.data(), mine.size());
    const auto late = run(0, 4, std::chrono::milliseconds(100));
    ASSERT_FALSE(late);
    EXPECT_EQ(late.error().code, ErrorCode::kAborted) << late.error().to_string();
    EXPECT_EQ(late.error().rank, 1);
    Bytes now(reused.size());
    tensors[1].read(0, now.data(), now.size());
    EXPECT_TRUE(now == reused) << name(collective);
  }
}

TEST(HostCollectives, NameTheRankThatMadeAnotherCall) {
  for (const Collective other : kAll) {
    if (other == Collective::kAllReduce || other == Collective::kBroadcast || other == Collective::kScatter) continue;
    HostCommRanks ranks(2);
    std::vector<float> data(64), more(64);
    Result<> results[2];
    ranks.run([&](Rank rank, HostComm& comm) {
      Operation operation;
      operation.call = {.collective = rank == 0 ? Collective::kAllReduce : other, .dtype = Dtype::kFloat32};
      operation.call.count = rank == 0 ? 12 : 10;
      operation.call.sequence = 18;
      operation.input = operation.output = BufferView(data.data(), 12, Dtype::kFloat32);
      if (rank == 1) operation.input = BufferView(more.data(), 20, Dtype::kFloat32);
      if (rank == 1) operation.output = operation.input;
      results[rank] = run_on_host(comm, operation, Deadline::after(std::chrono::seconds(60)));
    });
    ASSERT_FALSE(results[0]) << name(other);
    EXPECT_EQ(results[0].error().code, ErrorCode::kMismatch);
    EXPECT_EQ(results[0].error().rank, 1);
    EXPECT_NE(results[0].error().message.find(std::string("rank 1 called ") + name(other) + " #18"), std::string::npos)
        << results[0].error().message;
    EXPECT_NE(results[0].error().message.find("rank 0 called all_reduce #18 (float32[12], sum)"), std::string::npos);
  }
}

TEST(HostCollectives, CompareSentAndExpectedLengths) {
  HostCommRanks ranks(2);
  std::vector<int32_t> from(8), to(8);
  Result<> results[2];
  ranks.run([&](Rank rank, HostComm& comm) {
    Operation operation;
    operation.call = {.collective = Collective::kAllToAll, .dtype = Dtype::kInt32, .count = 0, .layout = 1};
    operation.input = BufferView(from.data() + 4 * rank, 4, Dtype::kInt32);
    operation.output = BufferView(to.data() + 4 * rank, 4, Dtype::kInt32);
    operation.counts = {2, 2};
    operation.receive_counts = rank == 0 ? std::vector<size_t>{2, 2} : std::vector<size_t>{1, 3};
    results[rank] = run_on_host(comm, operation, Deadline::after(std::chrono::seconds(60)));
  });
  ASSERT_FALSE(results[1]);
  EXPECT_EQ(results[1].error().code, ErrorCode::kMismatch);
  EXPECT_EQ(results[1].error().message, "rank 0 sends 2 elements to rank 1, which expects 1");
}

TEST(HostCollectives, NameTheRanksThatAreLate) {
  HostCommRanks ranks(4);
  const auto expect_late = [&](Rank rank, Rank first, const std::string& what) {
    const auto result = run_on_host(ranks.comm(rank), Operation{}, Deadline::after(Duration::zero()));
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kTimeout);
    EXPECT_EQ(result.error().rank, first);
    EXPECT_EQ(result.error().message, what);
  };
  expect_late(2, 0, "rank 0 has not arrived in time; neither have others: 1, 3");
  expect_late(0, 1, "rank 1 has not arrived in time; neither have others: 3");
}

}  // namespace
}  // namespace muster::test
