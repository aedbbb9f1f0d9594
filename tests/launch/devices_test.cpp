#include "muster/launch/options/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int> seen(const std::string& list) {
  return visible_devices({10, 11, 12, 13}, {{"CUDA_VISIBLE_DEVICES", list}});
}

TEST(VisibleDevices, AreThoseOfTheListInItsOrder) {
  EXPECT_THAT(visible_devices({10, 11}, {}), ElementsAre(10, 11));
  EXPECT_THAT(seen("3,0"), ElementsAre(13, 10));
  EXPECT_THAT(seen(" 2, 1"), ElementsAre(12, 11));
  EXPECT_THAT(seen("1,GPU-8932f937,MIG-1"), ElementsAre(11, -1, -1));
}

TEST(VisibleDevices, EndAtAnInvalidEntry) {
  EXPECT_THAT(seen("2,-1,0"), ElementsAre(12));
  EXPECT_THAT(seen("1,4,0"), ElementsAre(11));
  for (const char* none : {"", "-1", "NoDevFiles", "none"}) EXPECT_THAT(seen(none), IsEmpty()) << none;
  EXPECT_THAT(visible_devices({}, {{"CUDA_VISIBLE_DEVICES", "GPU-8932f937"}}), IsEmpty());
}

TEST(VisibleDevices, OfAmdAreFilteredByEachVariable) {
  EXPECT_THAT(visible_devices({10, 11, 12}, {{"ROCR_VISIBLE_DEVICES", "2,0"}, {"HIP_VISIBLE_DEVICES", "1"}}),
              ElementsAre(10));
}

class Gpus : public ::testing::Test {
 protected:
  Gpus() { ::mkdtemp(root_.data()); }
  ~Gpus() override { std::filesystem::remove_all(root_); }
  void add(const std::string& path, const std::string& text = "") {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  std::string root_ = ::testing::TempDir() + "gpus-XXXXXX";
};

TEST_F(Gpus, OfNvidiaHaveANumberedFile) {
  EXPECT_EQ(count_gpus(root_), 0);
  for (const char* name : {"nvidia0", "nvidia7", "nvidiactl", "nvidia-uvm"}) add(std::string("/dev/") + name);
  EXPECT_EQ(count_gpus(root_), 2);
}

TEST_F(Gpus, OfAmdAreNodesOfTheDriverBesideTheCpus) {
  const char* const ids[] = {"0", "53687", "53688"};
  for (int node = 0; node < 3; ++node)
    add("/sys/class/kfd/kfd/topology/nodes/" + std::to_string(node) + "/gpu_id", ids[node]);
  EXPECT_EQ(count_gpus(root_), 0) << "a container without the device";
  add("/dev/kfd");
  EXPECT_EQ(count_gpus(root_), 2);
}

TEST_F(Gpus, AreNotNpusWhichHaveANumberedFileToo) {
  for (const char* name : {"davinci0", "davinci1", "davinci4", "davinci_manager"}) add(std::string("/dev/") + name);
  EXPECT_EQ(count_gpus(root_), 0);
  EXPECT_EQ(count_npus({}, root_), 3);
  EXPECT_EQ(count_npus({{"ASCEND_RT_VISIBLE_DEVICES", "0,4"}}, root_), 2);
  EXPECT_EQ(count_npus({{"ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3,4,5"}}, root_), 3);
}

}  // namespace
}  // namespace muster
