#include "muster/launch/cgroup.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "muster/launch/options/options.h"

namespace muster {
namespace {

class Cgroup : public ::testing::Test {
 protected:
  Cgroup() { ::mkdtemp(root_.data()); }
  ~Cgroup() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  // A host or container with version 2, whose mount shows the cgroup `top`.
  void use_v2(const std::string& own, const std::string& top = "/") const {
    write("/proc/self/cgroup", "0::" + own + "\n");
    write("/proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n30 23 0:26 " + top +
                                      " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  // A host or container with version 1, and a hierarchy of version 2 without controllers.
  void use_v1(const std::string& own, const std::string& top = "/") const {
    write("/proc/self/cgroup", "9:memory:" + own + "\n4:cpu,cpuacct:" + own + "\n1:name=systemd:/\n0::/\n");
    write("/proc/self/mountinfo", "33 31 0:30 " + top + " /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n" +
                                      "35 31 0:32 " + top + " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
                                      "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  }

  std::string root_ = ::testing::TempDir() + "cgroup-XXXXXX";
};

TEST_F(Cgroup, QuotaOfVersion2IsRoundedUp) {
  use_v2("/job");
  EXPECT_EQ(cgroup_cpus(root_), std::nullopt) << "no file";
  for (const auto& [text, cpus] : std::initializer_list<std::pair<const char*, int>>{
           {"150000 100000", 2}, {"200000 100000", 2}, {"1000 100000", 1}, {"9223372036854775807 1", 2147483647}}) {
    write("/sys/fs/cgroup/job/cpu.max", text);
    EXPECT_EQ(cgroup_cpus(root_), cpus) << text;
  }
}

TEST_F(Cgroup, BadTextIsNoQuota) {
  use_v2("/job");
  for (const char* text : {"", "max 100000", "200000", "0 100000", "200000 0", "-1 100000", "200000 -1", "x y",
                           "99999999999999999999 100000", "2e5 100000"}) {
    write("/sys/fs/cgroup/job/cpu.max", text);
    EXPECT_EQ(cgroup_cpus(root_), std::nullopt) << text;
  }
  for (const char* text : {"", "0", "0::", "::", "nothing\n\n"}) {
    write("/proc/self/cgroup", text);
    EXPECT_EQ(cgroup_cpus(root_), std::nullopt) << text;
  }
  for (const char* text : {"", "- - -", "1 2 3 4 5 - cgroup2", "1 2 3 / - cgroup2 x y"}) {
    write("/proc/self/mountinfo", text);
    EXPECT_EQ(cgroup_cpus(root_), std::nullopt) << text;
  }
}

TEST_F(Cgroup, SmallestQuotaOfAllLevelsCounts) {
  use_v2("/pod/container/step");
  write("/sys/fs/cgroup/pod/cpu.max", "300000 100000");
  write("/sys/fs/cgroup/pod/container/cpu.max", "max 100000");
  write("/sys/fs/cgroup/pod/container/step/cpu.max", "800000 100000");
  write("/sys/fs/cgroup/other/cpu.max", "100000 100000");
  EXPECT_EQ(cgroup_cpus(root_), 3);
}

TEST_F(Cgroup, QuotaOfVersion1HasTwoFiles) {
  use_v1("/job");
  write("/sys/fs/cgroup/unified/cpu.max", "100000 100000");
  write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_cpus(root_), std::nullopt);
  write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "250000");
  write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cgroup_cpus(root_), 3);
}

// Docker without a cgroup namespace: the path is the host's, and the mount begins at the container's cgroup.
TEST_F(Cgroup, MountOfAContainerMayBeginAtItsOwnCgroup) {
  use_v2("/docker/4711", "/docker/4711");
  write("/sys/fs/cgroup/cpu.max", "200000 100000");
  EXPECT_EQ(cgroup_cpus(root_), 2);
  use_v2("/docker/4711", "/docker/other");
  EXPECT_EQ(cgroup_cpus(root_), 2) << "its own cgroup is not visible";
  use_v2("/../outside");
  EXPECT_EQ(cgroup_cpus(root_), 2) << "it was moved out of its namespace";
}

TEST_F(Cgroup, UsableCpusAreThoseOfTheMaskAndTheQuota) {
  use_v2("/job");
  EXPECT_EQ(usable_cpus(8, root_), 8);
  EXPECT_EQ(usable_cpus(0, root_), 1);
  write("/sys/fs/cgroup/job/cpu.max", "250000 100000");
  EXPECT_EQ(usable_cpus(8, root_), 3);
  EXPECT_EQ(usable_cpus(2, root_), 2);
}

TEST_F(Cgroup, MemoryOfVersion2HasTheSmallestLimit) {
  use_v2("/pod/step");
  write("/sys/fs/cgroup/pod/memory.max", "1073741824");
  write("/sys/fs/cgroup/pod/memory.peak", "1073000000");
  write("/sys/fs/cgroup/pod/memory.events", "oom_kill 9");
  write("/sys/fs/cgroup/pod/step/memory.max", "max");
  write("/sys/fs/cgroup/pod/step/memory.peak", "5000");
  write("/sys/fs/cgroup/pod/step/memory.events", "low 0\nmax 12\noom 1\noom_kill 3\noom_group_kill 0\n");
  const CgroupMemory memory = cgroup_memory(root_);
  EXPECT_EQ(memory.oom_kills, 3U) << "that of its own cgroup";
  EXPECT_EQ(memory.limit, 1073741824U);
  EXPECT_EQ(memory.peak, 1073000000U);
}

TEST_F(Cgroup, MemoryOfVersion1HasOtherFiles) {
  use_v1("/job");
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  write("/sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n");
  write("/sys/fs/cgroup/memory/job/memory.max_usage_in_bytes", "7000");
  CgroupMemory memory = cgroup_memory(root_);
  EXPECT_EQ(memory.oom_kills, 2U);
  EXPECT_EQ(memory.limit, std::nullopt);
  EXPECT_EQ(memory.peak, 7000U);
  write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "8000");
  memory = cgroup_memory(root_);
  EXPECT_EQ(memory.limit, 8000U);
  EXPECT_EQ(memory.peak, 7000U);
}

TEST_F(Cgroup, MemoryOfBadTextIsUnknown) {
  use_v2("/job");
  for (const char* text : {"", "oom_kill", "oom_kill -1", "oom_kill x", "\xff", "-5", "12e3"}) {
    for (const char* name : {"memory.events", "memory.max", "memory.peak"})
      write(std::string("/sys/fs/cgroup/job/") + name, text);
    const CgroupMemory memory = cgroup_memory(root_);
    EXPECT_EQ(memory.oom_kills, 0U) << text;
    EXPECT_EQ(memory.limit, std::nullopt) << text;
    EXPECT_EQ(memory.peak, std::nullopt) << text;
  }
}

}  // namespace
}  // namespace muster
