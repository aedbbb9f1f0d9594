#include "muster/transport/links/process_monitor.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "muster/io/host_identity.h"

namespace muster {
namespace {

/// Starts a process that does nothing until the test ends it.
class ProcessMonitorTest : public testing::Test {
 protected:
  void SetUp() override {
    child_ = fork();
    if (child_ == 0) {
      for (;;) pause();
    }
    ASSERT_GT(child_, 0);
    self_.pid = getpid();
    self_.domain = process_domain();
    peer_ = self_;
    peer_.pid = child_;
  }
  void TearDown() override {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }

  const std::unique_ptr<Loop> loop_ = Loop::create().value();
  pid_t child_ = -1;
  ProcessIdentity self_, peer_;
};

TEST_F(ProcessMonitorTest, ReportsTheDeathOfAPeerOfThisHost) {
  bool died = false;
  const Fd process = monitor_process(*loop_, self_, peer_, [&] { died = true; });
  ASSERT_TRUE(process);
  kill(child_, SIGKILL);
  EXPECT_TRUE(loop_->run_until([&] { return died; }, Deadline::after(std::chrono::seconds(60))));
}

TEST_F(ProcessMonitorTest, IgnoresPeersOfAnotherMachine) {
  // The initial PID namespace has the same number on every machine, so only the boot id differs.
  peer_.domain = "1c6ad1fb-0000-4444-8888-0123456789ab/pid:" + std::to_string(pid_namespace());
  EXPECT_FALSE(monitor_process(*loop_, self_, peer_, [] {}));
}

TEST_F(ProcessMonitorTest, IgnoresPeersOfAnotherNamespace) {
  peer_.domain = boot_id() + "/pid:" + std::to_string(pid_namespace() + 1);
  EXPECT_FALSE(monitor_process(*loop_, self_, peer_, [] {}));
}

TEST_F(ProcessMonitorTest, IgnoresPeersOfAnUnknownHost) {
  self_.domain = peer_.domain = "";
  EXPECT_FALSE(monitor_process(*loop_, self_, peer_, [] {}));
}

TEST(HostIdentity, IsTheSameForAllProcessesOfAHost) {
  EXPECT_EQ(process_domain(), process_domain());
  EXPECT_EQ(shared_memory_domain(), shared_memory_domain());
  EXPECT_TRUE(process_domain().starts_with(boot_id() + "/"));
  EXPECT_TRUE(shared_memory_domain().starts_with(boot_id() + "/"));
  EXPECT_NE(process_domain(), shared_memory_domain());
}

}  // namespace
}  // namespace muster
