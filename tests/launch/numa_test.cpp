#include "muster/launch/workers/numa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace muster {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two sockets with two NUMA nodes each. A node has four cores with one thread each, in two core complexes.
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

TEST(NumaBinding, ARemoteDeviceKeepsOtherBindings) {
  NumaTopology topology = two_sockets();
  topology.devices = {-1, 3};
  EXPECT_THAT(bound(NumaBinding::kNode, 2, topology), ElementsAre(Cpus{0, 1, 2, 3}, Cpus{12, 13, 14, 15}));
}

TEST(NumaBinding, SocketIsAllNodesOfTheSocket) {
  NumaTopology topology = two_sockets();
  topology.devices = {2};
  EXPECT_THAT(bound(NumaBinding::kSocket, 1, topology), ElementsAre(Cpus{8, 9, 10, 11, 12, 13, 14, 15}));
}

TEST(NumaBinding, ExclusiveDividesTheCores) {
  EXPECT_THAT(bound(NumaBinding::kExclusive, 8, two_sockets()),
              ElementsAre(Cpus{0, 1}, Cpus{2, 3}, Cpus{4, 5}, Cpus{6, 7}, Cpus{8, 9}, Cpus{10, 11}, Cpus{12, 13},
                          Cpus{14, 15}));
}

TEST(NumaBinding, ExclusiveAssignsAllCoresWhole) {
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

TEST(NumaBinding, NoneBindsNoWorker) {
  EXPECT_THAT(bound(NumaBinding::kNone, 3, two_sockets()), Each(IsEmpty()));
  EXPECT_THAT(bound(NumaBinding::kNode, 3, NumaTopology{}), Each(IsEmpty()));
}

TEST(NumaBinding, CpusAreShownAsRanges) {
  EXPECT_EQ(cpu_list({0, 1, 2, 3, 8}), "0-3,8");
  EXPECT_EQ(cpu_list({5}), "5");
  EXPECT_EQ(cpu_list({}), "");
}

// A directory with the layout of /sys.
class NumaTopologyTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(::mkdtemp(sys_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(sys_); }
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = sys_ + "/" + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  void add_cpu(int cpu, int package, const std::string& threads, const std::string& cache) const {
    const std::string directory = "devices/system/cpu/cpu" + std::to_string(cpu);
    write(directory + "/topology/physical_package_id", std::to_string(package));
    write(directory + "/topology/thread_siblings_list", threads);
    write(directory + "/cache/index0/level", "1");
    write(directory + "/cache/index0/shared_cpu_list", threads);
    write(directory + "/cache/index3/level", "3");
    write(directory + "/cache/index3/shared_cpu_list", cache);
  }
  void add_gpu(const std::string& address, const std::string& vendor, int node) const {
    write("bus/pci/devices/" + address + "/class", "0x030200");
    write("bus/pci/devices/" + address + "/vendor", vendor);
    write("bus/pci/devices/" + address + "/numa_node", std::to_string(node));
  }

  std::string sys_ = testing::TempDir() + "muster-sys-XXXXXX";
};

TEST_F(NumaTopologyTest, HasCoresCachesAndPackagesOfEachNode) {
  write("devices/system/node/node0/cpulist", "0-3");
  write("devices/system/node/node2/cpulist", "4-5,10");
  write("devices/system/node/node3/cpulist", "");
  for (const int cpu : {0, 1}) add_cpu(cpu, 0, "0-1", "0-3");
  for (const int cpu : {2, 3}) add_cpu(cpu, 0, "2-3", "0-3");
  for (const int cpu : {4, 5, 10}) add_cpu(cpu, 1, std::to_string(cpu), cpu == 10 ? "10" : "4-5");
  const auto topology = read_numa_topology(sys_, {0, 1, 3, 4, 5, 10});
  ASSERT_EQ(topology.nodes.size(), 2U) << "node 3 is memory without CPUs";
  EXPECT_THAT(topology.nodes[0].cores, ElementsAre(Cpus{0, 1}, Cpus{3})) << "this process may not run on CPU 2";
  EXPECT_THAT(topology.nodes[0].complexes, ElementsAre(Cpus{0, 1, 3}));
  EXPECT_THAT(topology.nodes[1].cores, ElementsAre(Cpus{4}, Cpus{5}, Cpus{10}));
  EXPECT_THAT(topology.nodes[1].complexes, ElementsAre(Cpus{4, 5}, Cpus{10}));
  EXPECT_EQ(topology.nodes[1].package, 1);
}

TEST_F(NumaTopologyTest, ListsTheNodesOfGpusInPciOrder) {
  write("devices/system/node/node0/cpulist", "0");
  write("devices/system/node/node1/cpulist", "1");
  add_gpu("0000:c1:00.0", "0x10de", 0);
  add_gpu("0000:41:00.0", "0x10de", 1);
  add_gpu("0000:e1:00.0", "0x10de", -1);
  add_gpu("0000:01:00.0", "0x1002", 0);
  EXPECT_THAT(read_numa_topology(sys_, {0, 1}).devices, ElementsAre(1, 0, -1)) << "AMD's is the processor's own";
}

TEST_F(NumaTopologyTest, IsOneNodeIfTheKernelShowsNone) {
  const auto topology = read_numa_topology(sys_, {0, 1});
  ASSERT_EQ(topology.nodes.size(), 1U);
  EXPECT_THAT(topology.nodes[0].cores, ElementsAre(Cpus{0}, Cpus{1}));
}

TEST(NumaTopology, ThisMachineHasAllCpusThatWorkersMayRunOn) {
  size_t cpus = 0;
  for (const auto& node : read_numa_topology().nodes)
    for (const auto& core : node.cores) cpus += core.size();
  EXPECT_EQ(cpus, static_cast<size_t>(this_machine().cpus));
}

}  // namespace
}  // namespace muster
