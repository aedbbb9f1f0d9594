// Compares the plan of a collective in two levels with the operations that Hierarchy really runs.
#include "muster/group/engine/hierarchy_plan.h"

#include <gtest/gtest.h>

#include <memory>

#include "muster/group/engine/hierarchy.h"
#include "muster/group/operations.h"

namespace muster {
namespace {

constexpr int kRanks = 4, kHosts = 2, kLocals = kRanks / kHosts;

struct LevelSteps {
  std::vector<std::pair<Collective, size_t>> within;  ///< bytes of the tensor, or of the longest block
  std::vector<std::pair<Collective, size_t>> across;
};

size_t longest(const Operation& operation) {
  size_t count = operation.counts.empty() ? operation.call.count : 0;
  for (const size_t each : operation.counts) count = std::max(count, each);
  return count * size_of(operation.call.dtype);
}

Topology two_hosts() {
  std::vector<RankInfo> members(kRanks);
  for (Rank rank = 0; rank < kRanks; ++rank) {
    members[rank].rank = rank;
    members[rank].domain = std::to_string(rank / kLocals);
    members[rank].shares_memory = true;
  }
  return Topology(members);
}

/// Runs the collective at the rank of the root's host that has the longest share, and returns its operations.
LevelSteps run(Collective collective, size_t count) {
  const bool gathers = collective == Collective::kAllGather, scatters = collective == Collective::kReduceScatter;
  const std::unique_ptr<float[]> memory(new float[count * kRanks]);  // never read or written
  LevelSteps executed;
  const Hierarchy::Levels levels{[&](const Operation& operation, const Deadline&) -> Result<> {
                                   executed.within.emplace_back(operation.call.collective, longest(operation));
                                   return {};
                                 },
                                 [&](const Operation& operation, int, const Deadline&) -> Result<> {
                                   executed.across.emplace_back(operation.call.collective, longest(operation));
                                   return {};
                                 },
                                 [](const Deadline&) { return Result<>{}; }};
  const Topology topology = two_hosts();
  const Rank self = collective == Collective::kBarrier ? 0 : kLocals - 1;
  Operation operation;
  operation.call.collective = collective;
  if (collective != Collective::kBarrier) {
    operation.input = {memory.get(), scatters ? count * kRanks : count, Dtype::kFloat32};
    operation.output = {memory.get(), gathers ? count * kRanks : count, Dtype::kFloat32};
  }
  EXPECT_TRUE(validate_and_infer(operation, GroupSpec{self, kRanks, {}, 0}));
  EXPECT_TRUE(Hierarchy(topology, self, levels).run(operation, Deadline::after(std::chrono::seconds(60))));
  return executed;
}

/// The same operations according to the plan. All chunks must have the same length.
LevelSteps plan(Collective collective, const HierarchyPlan& hierarchy) {
  LevelSteps planned;
  for (double chunk = 0; chunk < hierarchy.chunks; ++chunk) {
    if (hierarchy.before) planned.within.emplace_back(hierarchy.before->collective, hierarchy.before->bytes);
    planned.across.emplace_back(hierarchy.across.collective, hierarchy.across.count * hierarchy.across.element_bytes);
    // The root's host has the whole of a broadcast already.
    if (hierarchy.after && collective != Collective::kBroadcast) {
      planned.within.emplace_back(hierarchy.after->collective, hierarchy.after->bytes);
    }
  }
  return planned;
}

TEST(HierarchyPlan, MatchesTheRunAtBothLevels) {
  constexpr size_t kChunk = Hierarchy::kChunkBytes / sizeof(float);
  for (const size_t count : {size_t{1}, size_t{300}, size_t{301}, 3 * kChunk}) {
    for (const Collective collective : {Collective::kAllReduce, Collective::kBroadcast, Collective::kReduce,
                                        Collective::kAllGather, Collective::kReduceScatter, Collective::kBarrier}) {
      CollectiveSpec whole{.collective = collective, .size = kRanks, .count = count, .element_bytes = sizeof(float)};
      if (collective == Collective::kBarrier) whole.count = 0;
      const HierarchyPlan hierarchy = plan_hierarchy(whole, kLocals, 2);
      const LevelSteps planned = plan(collective, hierarchy), executed = run(collective, count);
      auto sorted_planned = planned.within, sorted_executed = executed.within;
      std::ranges::sort(sorted_planned);  // overlapping chunks change the order
      std::ranges::sort(sorted_executed);
      EXPECT_EQ(sorted_planned, sorted_executed) << name(collective) << " of " << count;
      EXPECT_EQ(planned.across, executed.across) << name(collective) << " of " << count;
    }
  }
}

TEST(HierarchyPlan, OverlapsChunksAcrossAndWithinHosts) {
  const auto total = [](Collective collective, size_t chunks, double before, double across, double after) {
    CollectiveSpec whole{.collective = collective, .size = kRanks, .count = chunks * Hierarchy::kChunkBytes};
    return plan_hierarchy(whole, kLocals, 2).total(before, across, after);
  };
  EXPECT_EQ(total(Collective::kAllReduce, 1, 1, 10, 2), 13);
  EXPECT_EQ(total(Collective::kAllReduce, 3, 1, 10, 2), 13 + 2 * 10);
  EXPECT_EQ(total(Collective::kAllReduce, 3, 8, 10, 4), 22 + 2 * 12);
  EXPECT_EQ(total(Collective::kBroadcast, 3, 1, 10, 2), 13 + 2 * 12);
  EXPECT_EQ(total(Collective::kReduce, 3, 1, 10, 2), 3 * 13);
}

}  // namespace
}  // namespace muster
