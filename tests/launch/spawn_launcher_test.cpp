#include "muster/launch/workers/spawn_launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <utility>
#include <vector>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

class SpawnLauncherTest : public ::testing::Test {
 protected:
  void SetUp() override {
    adopt_orphans();
    WorkerLauncher::Events events;
    events.started = [this](int rank, pid_t pid) { pids_[rank] = pid; };
    events.failed = [](const Error& error) { ADD_FAILURE() << error.message; };
    events.ended = [this](pid_t pid, int status) {
      ended_.emplace_back(pid, status);
      if (terminate_at_first_end_ && ended_.size() == 1) launcher_.terminate(SIGTERM);
    };
    events.empty = [this] { ++empties_; };
    launcher_.attach(events);
  }
  void start(int rank, const std::string& code) {
    WorkerSpec spec;
    spec.rank = rank;
    spec.command = {"/bin/sh", "-c", code};
    launcher_.start(spec, WorkerPipes::open(false).value());
  }
  // Waits until `pid` can be reaped, and does not reap it.
  static void await_end(pid_t pid) {
    siginfo_t info{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT), 0);
  }

  std::unique_ptr<Loop> loop_ = Loop::create().value();
  SpawnLauncher launcher_{*loop_};
  std::map<int, pid_t> pids_;
  std::vector<std::pair<pid_t, int>> ended_;
  int empties_ = 0;
  bool terminate_at_first_end_ = false;
};

// A rank may fail because another rank was killed. Both may have ended before this process checks.
TEST_F(SpawnLauncherTest, ReportsAKilledWorkerBeforeOthersThatFailed) {
  for (const bool terminates : {false, true}) {
    terminate_at_first_end_ = terminates;
    ended_.clear();
    empties_ = 0;
    start(0, "exit 1");
    start(1, "exec sleep 1000");
    start(2, "exit 2");
    ::kill(pids_[1], SIGKILL);
    for (const auto& [rank, pid] : pids_) await_end(pid);
    launcher_.child_ended();
    EXPECT_THAT(ended_, ElementsAre(Pair(pids_[1], SIGKILL), Pair(pids_[0], 1 << 8), Pair(pids_[2], 2 << 8)));
    EXPECT_EQ(empties_, 1);
  }
}

// A worker may have children that do not handle the signal, such as those that load its data.
TEST_F(SpawnLauncherTest, SignalsWorkersAndNotTheirChildren) {
  for (const bool ends : {false, true}) {
    ended_.clear();
    empties_ = 0;
    // The worker stops itself when its handler is set. Its exit status is the signal that ended its child.
    start(0,
          "exec 2> /dev/null; trap 'kill $!; wait $!; exit $(($? - 128))' USR1; sleep 1000 & kill -STOP $$; while :; "
          "do wait; done");
    siginfo_t info{};
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pids_[0]), &info, WSTOPPED), 0);
    ::kill(pids_[0], SIGCONT);
    ends ? launcher_.terminate(SIGUSR1) : launcher_.signal(SIGUSR1);
    await_end(pids_[0]);
    launcher_.child_ended();
    EXPECT_THAT(ended_, ElementsAre(Pair(pids_[0], SIGTERM << 8)));
    EXPECT_EQ(empties_, 1);
  }
}

TEST_F(SpawnLauncherTest, KillsWorkersAndTheirOrphans) {
  start(0, "trap '' TERM; (trap '' TERM; sleep 1000) & exec sleep 1000");
  launcher_.terminate(SIGTERM);
  launcher_.kill();
  ASSERT_TRUE(loop_->run_until(
      [&] {
        launcher_.child_ended();
        return empties_ > 0;
      },
      Deadline::after(std::chrono::seconds(60))));
  ASSERT_EQ(ended_.size(), 1u);
  EXPECT_EQ(ended_[0].first, pids_[0]);
  EXPECT_THAT(running_children(), testing::IsEmpty());
}

}  // namespace
}  // namespace muster
