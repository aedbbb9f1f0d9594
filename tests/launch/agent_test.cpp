// Runs whole agents in this process: the store server, the coordinator and the rendezvous client run on their threads,
// and the sanitizers of the asan and tsan presets check all of them.

#include "muster/launch/agent/agent.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "muster/launch/process_tree.h"

namespace muster {
namespace {

class AgentTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(::mkdtemp(scratch_.data()), nullptr); }
  void TearDown() override {
    EXPECT_TRUE(reap_children().none_left) << "the agent has left processes";
    std::filesystem::remove_all(scratch_);
  }
  // Returns the exit status of a job of two workers that run this shell script.
  int run(std::vector<std::string> args, const std::string& script) const {
    args.insert(args.end(), {"--nproc-per-node=2", "--no-python", "/bin/sh", "-c", script});
    const auto options = parse_run_options(args, {}, Machine{2, 0, 0});
    EXPECT_TRUE(options) << options.error().message;
    DeathNotice death_notice;
    return options ? run_agent(*options, "muster", scratch_, death_notice) : -1;
  }

  std::string scratch_ = testing::TempDir() + "muster-agent-XXXXXX";
};

TEST_F(AgentTest, RunsWorkersToTheEnd) { EXPECT_EQ(run({}, "exit 0"), 0); }

TEST_F(AgentTest, ReturnsTheStatusOfTheFirstFailure) {
  EXPECT_EQ(run({}, "[ $RANK = 0 ] && exec sleep 1000; exit 7"), 7);
}

TEST_F(AgentTest, RestartsAllWorkersAfterAFailure) {
  EXPECT_EQ(run({"--max-restarts=2"}, "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 3"), 0);
  EXPECT_EQ(run({"--max-restarts=1"}, "[ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 3"), 3);
}

TEST_F(AgentTest, EndsOrphansOfWorkers) {
  EXPECT_EQ(run({"--shutdown-timeout=0.1"}, "(trap '' TERM; sleep 1000) & exit 0"), 0);
}

TEST_F(AgentTest, ReportsAProgramThatIsMissing) {
  const auto options = parse_run_options({"--no-python", "/no/such/program"}, {}, Machine{2, 0, 0}).value();
  DeathNotice death_notice;
  EXPECT_EQ(run_agent(options, "muster", scratch_, death_notice), 127);
}

}  // namespace
}  // namespace muster
