// Tests the real zygote with the system's Python. An empty module replaces torch.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sched.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>

#include "muster/launch/command.h"
#include "muster/launch/workers/zygote.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr Duration kProcessTimeout = std::chrono::seconds(60);

pid_t parent_of(pid_t pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");  // "pid (name) state parent ..."
  char state = 0;
  pid_t parent = 0;
  stat.ignore(std::numeric_limits<std::streamsize>::max(), ')') >> state >> parent;
  return parent;
}

class ZygoteProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto python = find_program("python3", current_environment());
    if (!python) GTEST_SKIP() << python.error().message;
    python_ = *python;
    adopt_orphans();
    ASSERT_NE(::mkdtemp(directory_.data()), nullptr);
    std::ofstream(directory_ + "/worker.py") << "import sys, time\n"
                                                "if sys.argv[1] == 'sleep': time.sleep(1000)\n"
                                                "sys.exit(int(sys.argv[1]))\n";
  }
  void TearDown() override {
    zygote_.reset();
    const Deadline deadline = Deadline::after(kProcessTimeout);  // the kernel kills orphans, which takes time
    while (!reap_children().none_left && !deadline.passed()) ::sched_yield();
    EXPECT_TRUE(reap_children().none_left);
    std::filesystem::remove_all(directory_);
  }
  void add_torch() const { std::ofstream(directory_ + "/torch.py") << "\n"; }
  void launch(bool again = false) {
    environment_["PYTHONPATH"] = directory_;
    Zygote::Options options{python_, {}, environment_};
    options.warm = false;
    options.again = again;
    zygote_ = std::make_unique<Zygote>(*loop_, console_, std::move(options));
    zygote_->attach({
        [this](int rank, pid_t pid) { pids_[rank] = pid; },
        [this](const Error& error) { errors_.push_back(error.message); },
        [this](pid_t pid, int status) { ended_.emplace_back(pid, status); },
        [this] { ++empties_; },
    });
  }
  void start(int rank, const std::string& argument) {
    WorkerSpec spec;
    spec.rank = rank;
    spec.command = {python_, "-u", directory_ + "/worker.py", argument};
    spec.environment = environment_;
    zygote_->start(spec, WorkerPipes::open(false).value());
  }
  void await(const std::function<bool()>& done) {
    ASSERT_TRUE(loop_->run_until(
        [&] {
          zygote_->child_ended();
          return done();
        },
        Deadline::after(kProcessTimeout)));
  }

  std::string directory_ = testing::TempDir() + "muster-zygote-XXXXXX", python_;
  Environment environment_ = current_environment();
  std::unique_ptr<Loop> loop_ = Loop::create().value();
  Console console_{*loop_};
  std::unique_ptr<Zygote> zygote_;
  std::map<int, pid_t> pids_;
  std::vector<std::pair<pid_t, int>> ended_;
  std::vector<std::string> errors_;
  int empties_ = 0;
};

TEST_F(ZygoteProcess, ForksWorkersAndReportsTheirStatus) {
  add_torch();
  launch();
  start(0, "0");
  start(1, "7");
  await([&] { return ended_.size() == 2 && empties_ > 0; });
  EXPECT_THAT(ended_, UnorderedElementsAre(Pair(pids_[0], 0), Pair(pids_[1], 7 << 8)));
}

TEST_F(ZygoteProcess, KillsItsWorkers) {
  add_torch();
  launch();
  start(0, "sleep");
  await([&] { return pids_.contains(0); });
  zygote_->kill();
  await([&] { return empties_ > 0; });
  EXPECT_THAT(ended_, ElementsAre(Pair(pids_[0], SIGKILL)));
}

TEST_F(ZygoteProcess, IsReplacedAfterItWasKilled) {
  add_torch();
  launch(/*again=*/true);
  start(0, "sleep");
  await([&] { return pids_.contains(0); });
  const auto children = running_children();
  ASSERT_EQ(children.size(), 1u);
  ::kill(children.front().pid, SIGKILL);
  await([&] { return empties_ > 0; });
  EXPECT_THAT(ended_, ElementsAre(Pair(pids_[0], SIGKILL)));
  ended_.clear();
  empties_ = 0;
  start(1, "sleep");
  await([&] { return pids_.contains(1); });
  EXPECT_GT(parent_of(pids_[1]), 1);
  EXPECT_NE(parent_of(pids_[1]), ::getpid()) << "the worker was spawned, not forked from a new zygote";
  zygote_->kill();
  await([&] { return empties_ > 0; });
  EXPECT_THAT(ended_, ElementsAre(Pair(pids_[1], SIGKILL)));
}

TEST_F(ZygoteProcess, SpawnsWorkersWithoutTorch) {
  launch();
  start(0, "5");
  await([&] { return !ended_.empty() && empties_ > 0; });
  EXPECT_THAT(ended_, ElementsAre(Pair(pids_[0], 5 << 8)));
  EXPECT_THAT(errors_, testing::IsEmpty());
}

}  // namespace
}  // namespace muster
