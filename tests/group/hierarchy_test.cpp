// Groups over several hosts whose ranks share memory: every collective, and the bytes that cross hosts.
#include <gtest/gtest.h>

#include "contract/group_contract.h"
#include "muster/group/engine/hierarchy.h"
#include "muster/group/engine/schedule_runner.h"
#include "muster/group/operations.h"

namespace muster {
namespace {

using test::options_for;

/// Assigns ranks to hosts in order. `ranks` gives the number of ranks of each host, and repeats.
GroupKind hosts_of(const std::string& name, std::vector<int> ranks) {
  return {name, [ranks = std::move(ranks)](Rank rank) {
            size_t host = 0;
            for (Rank first = 0; first + ranks[host % ranks.size()] <= rank; ++host)
              first += ranks[host % ranks.size()];
            auto options = options_for("shm,tcp");
            options.host_label = std::to_string(host);
            return options;
          }};
}

/// Assigns consecutive ranks to different hosts.
GroupKind dealt(const std::string& name, int hosts) {
  return {name, [hosts](Rank rank) {
            auto options = options_for("shm,tcp");
            options.host_label = std::to_string(rank % hosts);
            return options;
          }};
}

INSTANTIATE_TEST_SUITE_P(Pairs, GroupContract, group_sizes(hosts_of("Pairs", {2}), {4, 6}), group_name);
INSTANTIATE_TEST_SUITE_P(Uneven, GroupContract, group_sizes(hosts_of("Uneven", {3, 1, 2}), {4, 6, 7}), group_name);
INSTANTIATE_TEST_SUITE_P(Dealt, GroupContract, group_sizes(dealt("Dealt", 2), {5}), group_name);

// ---- what crosses between hosts

Topology topology_of(const std::vector<int>& host_of) {
  std::vector<RankInfo> members(host_of.size());
  for (size_t rank = 0; rank < members.size(); ++rank) {
    members[rank].rank = static_cast<Rank>(rank);
    members[rank].domain = std::to_string(host_of[rank]);
    members[rank].shares_memory = true;
  }
  return Topology(members);
}

/// Total bytes that all ranks send to other hosts in an operation: the bytes of its schedules between hosts.
size_t crossing_bytes(const Topology& topology, const Operation& like) {
  size_t bytes = 0;
  const int size = static_cast<int>(topology.host_of.size());
  const std::unique_ptr<uint8_t[]> tensor(new uint8_t[like.call.count * size]);  // never read or written
  for (Rank rank = 0; rank < size; ++rank) {
    ScheduleRunner schedule_runner;
    const Hierarchy::Levels levels{[](const Operation&, const Deadline&) { return Result<>{}; },
                                   [&](const Operation& operation, int, const Deadline&) -> Result<> {
                                     MUSTER_ASSIGN(const Schedule* schedule,
                                                   schedule_runner.plan(operation, topology.host_of[rank],
                                                                        static_cast<int>(topology.hosts.size())));
                                     for (const Step& step : schedule->steps)
                                       bytes += step.kind == Step::Kind::kSend ? step.from.bytes : 0;
                                     return {};
                                   },
                                   [](const Deadline&) { return Result<>{}; }};
    Operation operation = like;
    const bool gathers = like.call.collective == Collective::kAllGather;
    const bool scatters = like.call.collective == Collective::kReduceScatter;
    const size_t count = like.call.count;
    operation.input = {tensor.get(), scatters ? count * size : count, Dtype::kUint8};
    operation.output = {tensor.get(), gathers ? count * size : count, Dtype::kUint8};
    EXPECT_TRUE(validate_and_infer(operation, GroupSpec{rank, size, {}, 0}));
    const auto result = Hierarchy(topology, rank, levels).run(operation, Deadline::after(std::chrono::seconds(60)));
    EXPECT_TRUE(result) << result.error().to_string();
  }
  return bytes;
}

TEST(HierarchyTraffic, IsTheLeastPossibleBetweenHosts) {
  constexpr size_t kBytes = 9 << 20;  // more than one chunk
  for (const std::vector<int>& host_of :
       {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 2, 2}, {0, 1, 1, 1, 1}}) {
    const Topology topology = topology_of(host_of);
    const size_t others = topology.hosts.size() - 1;
    Operation operation;
    operation.call.count = kBytes;
    operation.call.root = 1;
    const auto crossing = [&](Collective collective) {
      operation.call.collective = collective;
      return crossing_bytes(topology, operation);
    };
    EXPECT_EQ(crossing(Collective::kAllReduce), 2 * others * kBytes);
    EXPECT_EQ(crossing(Collective::kBroadcast), others * kBytes);
    EXPECT_LT(crossing(Collective::kReduce), 2 * others * kBytes);  // its schedules send more bytes to save time
    EXPECT_EQ(crossing(Collective::kAllGather), others * kBytes * host_of.size());
    EXPECT_EQ(crossing(Collective::kReduceScatter), others * kBytes * host_of.size());
  }
}

TEST(HierarchyTraffic, IsSpreadOverTheRanksOfAHost) {
  const Topology topology = topology_of({0, 0, 0, 1, 2, 2});
  EXPECT_EQ(topology.shards, 3);
  for (int host = 0; host < 3; ++host) {
    std::vector<int> carried(topology.host_local_size(host));
    for (int shard = 0; shard < topology.shards; ++shard) {
      const int local = topology.shard_rank(host, shard);
      EXPECT_GE(shard, topology.first_shard(host, local));
      EXPECT_LT(shard, topology.first_shard(host, local + 1));
      ++carried[local];
    }
    for (const int shards : carried) EXPECT_GT(shards, 0);
  }
  // Every rank's own block has its own shard.
  for (int host = 0; host < 3; ++host) {
    int owners = 0;
    for (int shard = 0; shard < topology.shards; ++shard) owners += topology.owner(host, shard) != kNoRank;
    EXPECT_EQ(owners, topology.host_local_size(host));
  }
}

TEST(GroupHierarchy, LinksHostsByTcpAndSharesMemoryWithin) {
  test::run_group(4, hosts_of("Pairs", {2}).options, [](Group& group) { EXPECT_EQ(group.transport(), "shm+tcp"); });
}

}  // namespace
}  // namespace muster
