#include "muster/launch/agent/worker_timers.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "muster/launch/private_directories.h"

namespace muster {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class WorkerTimersTest : public testing::Test {
 protected:
  WorkerTimersTest() : worker_(::fork()) {
    if (worker_ == 0) {
      ::alarm(60);
      while (true) ::pause();
    }
    open({{"TORCHELASTIC_ENABLE_FILE_TIMER", "1"}});
  }
  ~WorkerTimersTest() override {
    ::kill(worker_, SIGKILL);
    ::waitpid(worker_, nullptr, 0);
  }

  void open(const Environment& environment) {
    timers_ = *WorkerTimers::from_environment(*loop_, environment, scratch_.path(),
                                              {[this](const WorkerTimers::Expired& timer) {
                                                 expired_.push_back(fmt::format("{} {}", timer.scope, timer.signal));
                                               },
                                               [this](const std::string& text) { notices_.push_back(text); }});
  }
  void write(const std::string& text) const { std::ofstream(timers_->path()) << text; }
  void ask(const std::string& scope, double seconds, int signal = SIGKILL) const {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    write(fmt::format(R"({{"version": 1, "pid": {}, "scope_id": "{}", "expiration_time": {}, "signal": {}}})"
                      "\n",
                      worker_, scope, seconds < 0 ? seconds : now.count() + seconds, signal));
  }
  void run() {
    while (loop_->poll()) continue;
  }
  void run_until(const std::function<bool()>& done) {
    EXPECT_TRUE(loop_->run_until(done, Deadline::after(std::chrono::seconds(60))));
  }

  const pid_t worker_;
  ScratchDirectory scratch_;
  std::unique_ptr<Loop> loop_ = std::move(*Loop::create());
  std::vector<std::string> expired_, notices_;
  std::unique_ptr<WorkerTimers> timers_;
};

TEST_F(WorkerTimersTest, SignalsAWorkerThatIsLate) {
  ask("step", 0.01);
  run_until([&] { return !expired_.empty(); });
  siginfo_t end{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(worker_), &end, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(end.si_code, CLD_KILLED);
  EXPECT_EQ(end.si_status, SIGKILL);
  EXPECT_THAT(expired_, ElementsAre("step 9"));
  EXPECT_THAT(notices_, IsEmpty());
}

TEST_F(WorkerTimersTest, ForgetsReleasedTimers) {
  ask("step", 1000);
  ask("other", 1000);
  ask("step", 0);  // replaces the first one
  ask("step", -1);
  run();
  EXPECT_THAT(expired_, IsEmpty());
  EXPECT_EQ(::waitpid(worker_, nullptr, WNOHANG), 0);
}

TEST_F(WorkerTimersTest, OnlyReportsATimerWithoutASignal) {
  ask("first", 0.01, 0);
  ask("second", 0.02, -1);
  run_until([&] { return expired_.size() == 2; });
  EXPECT_THAT(expired_, ElementsAre("first 0", "second 0"));
  EXPECT_EQ(::waitpid(worker_, nullptr, WNOHANG), 0);
}

TEST_F(WorkerTimersTest, IgnoresProcessesThatHaveEnded) {
  ask("step", 0.01);
  run();
  ::kill(worker_, SIGKILL);
  ::waitpid(worker_, nullptr, 0);
  ask("step", 0);
  for (const Deadline end = Deadline::after(std::chrono::milliseconds(50)); !end.passed();) loop_->run_once(end);
  EXPECT_THAT(expired_, IsEmpty());
}

TEST_F(WorkerTimersTest, RefusesWhatIsNoRequest) {
  const std::vector<std::string> refused = {
      "nonsense",
      "[]",
      "{}",
      R"({"pid": 0, "scope_id": "", "expiration_time": 0, "signal": 9})",
      R"({"pid": -1, "scope_id": "", "expiration_time": 0, "signal": 9})",
      R"({"pid": 4294967297, "scope_id": "", "expiration_time": 0, "signal": 9})",
      R"({"pid": 1, "scope_id": "", "expiration_time": "0", "signal": 9})",
      R"({"pid": 1, "scope_id": "", "expiration_time": 0, "signal": 1000})",
  };
  for (const auto& line : refused) {
    notices_.clear();
    write(line + "\n");
    run();
    EXPECT_THAT(notices_, ElementsAre(HasSubstr("'" + line + "' is not a request for a timer")));
  }
  notices_.clear();
  write(std::string(2 * PIPE_BUF, 'x'));
  run();
  EXPECT_THAT(notices_, ElementsAre(HasSubstr("a request of more than")));
  write("\n");
  ask("step", 0.0, 0);
  run_until([&] { return !expired_.empty(); });
}

TEST_F(WorkerTimersTest, KeepsALimitedNumber) {
  for (int i = 0; i < 513; ++i) {
    ask("scope " + std::to_string(i), 1000);
    run();
  }
  EXPECT_THAT(notices_, ElementsAre(HasSubstr("there are 512 timers already")));
}

TEST_F(WorkerTimersTest, MakesAPrivatePipe) {
  const std::string path = scratch_.path() + "/asked";
  ASSERT_EQ(::mkfifo(path.c_str(), 0644), 0);  // of an earlier launcher
  open({{"TORCHELASTIC_ENABLE_FILE_TIMER", "1"}, {"TORCHELASTIC_TIMER_FILE", path}});
  EXPECT_EQ(timers_->path(), path);
  struct stat pipe {};
  ASSERT_EQ(::stat(path.c_str(), &pipe), 0);
  EXPECT_TRUE(S_ISFIFO(pipe.st_mode));
  EXPECT_EQ(pipe.st_mode & 0777U, 0600U);
  timers_.reset();
  EXPECT_FALSE(std::filesystem::exists(path));
  std::ofstream(path) << "of the user";
  const auto refused = WorkerTimers::from_environment(
      *loop_, {{"TORCHELASTIC_ENABLE_FILE_TIMER", "1"}, {"TORCHELASTIC_TIMER_FILE", path}}, scratch_.path(), {});
  EXPECT_THAT(refused.error().message, HasSubstr("cannot make the timers' pipe " + path));
}

TEST_F(WorkerTimersTest, LeavesThePipeOfAnOuterJob) {
  ScratchDirectory inner_scratch;
  const Environment environment = {{"TORCHELASTIC_ENABLE_FILE_TIMER", "1"},
                                   {"TORCHELASTIC_TIMER_FILE", timers_->path()}};
  auto inner = *WorkerTimers::from_environment(*loop_, environment, inner_scratch.path(), {});
  EXPECT_EQ(inner->path(), inner_scratch.path() + "/timers");
  inner.reset();
  ask("step", 0, 0);
  run_until([&] { return !expired_.empty(); });
}

TEST_F(WorkerTimersTest, RemovesOnlyItsOwnPipe) {
  const std::string path = timers_->path();
  ::unlink(path.c_str());
  std::ofstream(path) << "of a successor";
  timers_.reset();
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(WorkerTimersTest, IsOffByDefault) {
  EXPECT_EQ(*WorkerTimers::from_environment(*loop_, {{"TORCHELASTIC_TIMER_FILE", "/x"}}, scratch_.path(), {}), nullptr);
}

}  // namespace
}  // namespace muster
