#include "muster/launch/workers/numa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace muster {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two sockets of two NUMA nodes each; a node has four cores of one thread, in two complexes.
NumaTopology two_sockets() {
  NumaTopology topology;
  for (int node = 0; node < 4; ++node) {
    const int first = node * 4;
    topology.nodes.push_back(
        {node / 2, {{first}, {first + 1}, {first + 2}, {first + 3}}, {{first, first + 1}, {first + 2, first + 3}}});
  }
  return topology;
}

std::vector<Cpus> bound(NumaBinding binding, int nproc, const NumaTopology& topology) {
  const auto cpus = bind_workers(binding, nproc, topology);
  EXPECT_TRUE(cpus) << cpus.error().message;
  return cpus.value_or(std::vector<Cpus>{});
}

TEST(NumaBinding, NodeIsTheWholeNodeOfTheDevice) {
  NumaTopology topology = two_sockets();
  topology.devices = {3, 0};
  EXPECT_THAT(bound(NumaBinding::kNode, 2, topology), ElementsAre(Cpus{12, 13, 14, 15}, Cpus{0, 1, 2, 3}));
}

TEST(NumaBinding, WorkersWithoutADeviceAreSpreadEvenly) {
  EXPECT_THAT(bound(NumaBinding::kNode, 2, two_sockets()), ElementsAre(Cpus{0, 1, 2, 3}, Cpus{8, 9, 10, 11}));
}

TEST(NumaBinding, AWorkerWhoseDeviceIsFarFromAllCpusLeavesTheOthersTheirs) {
  NumaTopology topology = two_sockets();
  topology.devices = {-1, 3};
  EXPECT_THAT(bound(NumaBinding::kNode, 2, topology), ElementsAre(Cpus{0, 1, 2, 3}, Cpus{12, 13, 14, 15}));
}

TEST(NumaBinding, SocketIsAllNodesOfTheSocket) {
  NumaTopology topology = two_sockets();
  topology.devices = {2};
  EXPECT_THAT(bound(NumaBinding::kSocket, 1, topology), ElementsAre(Cpus{8, 9, 10, 11, 12, 13, 14, 15}));
}

TEST(NumaBinding, ExclusiveSharesTheCoresOut) {
  EXPECT_THAT(bound(NumaBinding::kExclusive, 8, two_sockets()),
              ElementsAre(Cpus{0, 1}, Cpus{2, 3}, Cpus{4, 5}, Cpus{6, 7}, Cpus{8, 9}, Cpus{10, 11}, Cpus{12, 13},
                          Cpus{14, 15}));
}

TEST(NumaBinding, ExclusiveGivesWholeCoresAndForgetsNone) {
  NumaTopology one;
  one.nodes.push_back({0, {{0, 4}, {1, 5}, {2, 6}}, {}});
  EXPECT_THAT(bound(NumaBinding::kExclusive, 2, one), ElementsAre(Cpus{0, 4}, Cpus{1, 2, 5, 6}));
}

TEST(NumaBinding, ExclusiveWithMoreWorkersThanCoresIsRefused) {
  const auto cpus = bind_workers(NumaBinding::kExclusive, 17, two_sockets());
  ASSERT_FALSE(cpus);
  EXPECT_EQ(cpus.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(cpus.error().message, HasSubstr("5 workers would share the 4 cores"));
}

TEST(NumaBinding, CoreComplexesAreTakenInTurn) {
  NumaTopology topology = two_sockets();
  topology.devices = {1, 1, 1};
  EXPECT_THAT(bound(NumaBinding::kCoreComplex, 3, topology), ElementsAre(Cpus{4, 5}, Cpus{6, 7}, Cpus{4, 5}));
  topology.nodes[1].complexes.clear();
  EXPECT_THAT(bound(NumaBinding::kCoreComplex, 1, topology), ElementsAre(Cpus{4, 5, 6, 7}));
}

TEST(NumaBinding, NoneBindsNobody) {
  EXPECT_THAT(bound(NumaBinding::kNone, 3, two_sockets()), Each(IsEmpty()));
  EXPECT_THAT(bound(NumaBinding::kNode, 3, NumaTopology{}), Each(IsEmpty()));
}

TEST(NumaBinding, CpusAreShownAsRanges) {
  EXPECT_EQ(cpu_list({0, 1, 2, 3, 8}), "0-3,8");
  EXPECT_EQ(cpu_list({5}), "5");
  EXPECT_EQ(cpu_list({}), "");
}

TEST(NumaTopology, ANodeWithoutCpusOfItsOwnIsNone) {
  if (this_machine().cpus < 2 || allowed_cpus()[1] != 1) GTEST_SKIP() << "needs CPUs 0 and 1";
  ::setenv("HWLOC_SYNTHETIC", "pack:1 [numa] [numa] core:2 pu:1", 1);
  const auto topology = read_numa_topology();
  ::unsetenv("HWLOC_SYNTHETIC");
  if (!topology && topology.error().code == ErrorCode::kUnsupported) GTEST_SKIP() << topology.error().message;
  ASSERT_TRUE(topology) << topology.error().message;
  ASSERT_EQ(topology->nodes.size(), 1U);
  EXPECT_THAT(topology->nodes[0].cores, ElementsAre(Cpus{0}, Cpus{1}));
}

TEST(NumaTopology, ThisMachineHasWhatItsWorkersMayRunOn) {
  const auto topology = read_numa_topology();
  if (!topology && topology.error().code == ErrorCode::kUnsupported) GTEST_SKIP() << topology.error().message;
  ASSERT_TRUE(topology) << topology.error().message;
  size_t cpus = 0;
  for (const auto& node : topology->nodes)
    for (const auto& core : node.cores) cpus += core.size();
  EXPECT_EQ(cpus, static_cast<size_t>(this_machine().cpus));
}

}  // namespace
}  // namespace muster
