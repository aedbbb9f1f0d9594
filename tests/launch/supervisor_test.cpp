#include "muster/launch/agent/supervisor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>

#include "muster/launch/options/options.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr Duration kReadTime = std::chrono::seconds(60);

// Starts no processes. The test decides what each worker writes to its pipe and when it ends.
class FakeLauncher : public WorkerLauncher {
 public:
  void start(const WorkerSpec& spec, WorkerPipes pipes) override {
    const pid_t pid = 1000 + spec.rank;
    workers_[pid] = std::move(pipes);
    events_.started(spec.rank, pid);
  }
  // Reports the end of workers within this call, as SpawnLauncher does: it reaps while it signals.
  void signal(int number) override { signals_.push_back(number); }
  void terminate(int number) override {
    signals_.push_back(number);
    while (!workers_.empty()) {
      const pid_t pid = workers_.begin()->first;
      write(pid, last_output_);
      end(pid, 1 << 8);
    }
    events_.empty();
  }
  void kill() override { terminate(SIGKILL); }
  void list_left(std::function<void(const std::vector<ChildProcess>&)> answer) override { answer({}); }
  void child_ended() override {}

  void write(pid_t pid, std::string_view text) {
    const WorkerPipes& pipes = workers_.at(pid);
    ::fcntl(pipes.err.get(), F_SETPIPE_SZ, 1 << 20);
    ASSERT_EQ(::write(pipes.err.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  int unread(pid_t pid) const {
    int bytes = 0;
    ::ioctl(workers_.at(pid).err.get(), FIONREAD, &bytes);
    return bytes;
  }
  void end(pid_t pid, int status) {
    workers_.erase(pid);
    events_.ended(pid, status);
  }
  void write_when_terminated(std::string text) { last_output_ = std::move(text); }
  const std::vector<int>& signals() const { return signals_; }

 private:
  std::map<pid_t, WorkerPipes> workers_;
  std::vector<int> signals_;
  std::string last_output_;
};

class SupervisorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    options_.nproc = kWorkers;
    options_.local_ranks_filter = {kWorkers};  // shows no worker's output
    scratch_ = testing::TempDir() + "muster-supervisor-XXXXXX";
    ASSERT_NE(::mkdtemp(scratch_.data()), nullptr);
    outputs_ = OutputFiles::create(*loop_, console_, options_, environment_, scratch_).value();
    ASSERT_TRUE(outputs_->begin_attempt(0));
    Supervisor::Events events;
    events.worker_ended = [](const WorkerExit&) {};
    events.failed = [this](const WorkerExit& exit, std::string report) {
      failed_ = exit;
      ++reports_;
      report_ = std::move(report);
    };
    const Supervisor::Options options{"host", *outputs_, {}, kReadTime, &launcher_, scratch_};
    supervisor_ = Supervisor::create(*loop_, console_, options, events).value();
  }
  void TearDown() override {
    supervisor_.reset();
    std::filesystem::remove_all(scratch_);
  }
  void start_workers() {
    std::vector<WorkerSpec> specs(kWorkers);
    for (int rank = 0; rank < kWorkers; ++rank) specs[static_cast<size_t>(rank)].rank = rank;
    ASSERT_TRUE(supervisor_->start(specs));
  }
  // The workers' cgroup is at the top of its mount.
  void set_oom_kills(int count) const {
    std::filesystem::create_directories(scratch_ + "/proc/self");
    std::ofstream(scratch_ + "/proc/self/cgroup") << "0::/\n";
    std::ofstream(scratch_ + "/proc/self/mountinfo") << "1 0 0:1 / / rw - cgroup2 cgroup2 rw\n";
    std::ofstream(scratch_ + "/memory.events") << "oom_kill " << count << "\n";
    std::ofstream(scratch_ + "/memory.max") << (1 << 30) << "\n";
  }
  // Returns after the supervisor has read `text`.
  void write(int rank, const std::string& text) {
    launcher_.write(1000 + rank, text);
    while (launcher_.unread(1000 + rank) > 0) ASSERT_TRUE(loop_->run_once(Deadline::after(kReadTime)));
  }

  static constexpr int kWorkers = 3;
  std::unique_ptr<Loop> loop_ = Loop::create().value();
  Console console_{*loop_};
  RunOptions options_;
  const Environment environment_;
  std::string scratch_;
  std::unique_ptr<OutputFiles> outputs_;
  FakeLauncher launcher_;
  std::unique_ptr<Supervisor> supervisor_;
  std::optional<WorkerExit> failed_;
  std::string report_;
  int reports_ = 0;
};

// When the other workers are stopped, they write more output. This moves the output that they wrote before.
TEST_F(SupervisorTest, ReportsOutputOfOtherWorkersBeforeTheFailure) {
  start_workers();
  const std::string full(Tail::kMax, '.');
  write(0, "first worker before\n");
  write(2, full + "\nlast worker before\n");
  launcher_.write_when_terminated(full + "\nafter\n");
  launcher_.end(1001, SIGSEGV);
  ASSERT_TRUE(failed_);
  EXPECT_EQ(failed_->rank, 1);
  EXPECT_THAT(report_, HasSubstr("first worker before"));
  EXPECT_THAT(report_, HasSubstr("last worker before"));
  EXPECT_THAT(report_, Not(HasSubstr("after")));
  EXPECT_TRUE(supervisor_->gone());
}

TEST_F(SupervisorTest, ReportsOnlyTheFirstFailure) {
  start_workers();
  launcher_.end(1002, 7 << 8);
  EXPECT_EQ(reports_, 1) << "the others end with a failure of their own, because they are stopped";
  EXPECT_EQ(failed_->rank, 2);
  EXPECT_EQ(failed_->code, 7);
  EXPECT_THAT(report_, HasSubstr("ranks 0, 1 running"));
}

TEST_F(SupervisorTest, StartsTheNextGenerationAfterTheFirstEnds) {
  start_workers();
  launcher_.end(1000, SIGKILL);
  ASSERT_TRUE(supervisor_->gone());
  failed_.reset();
  start_workers();
  EXPECT_FALSE(supervisor_->gone());
  launcher_.end(1001, SIGKILL);
  ASSERT_TRUE(failed_);
  EXPECT_EQ(failed_->rank, 1);
}

TEST_F(SupervisorTest, WorkersGoOnAfterAForwardedSignal) {
  start_workers();
  supervisor_->forward(SIGUSR1);
  EXPECT_THAT(launcher_.signals(), ElementsAre(SIGUSR1));
  EXPECT_FALSE(supervisor_->gone());
  supervisor_->stop(SIGHUP);
  EXPECT_THAT(launcher_.signals(), ElementsAre(SIGUSR1, SIGHUP)) << "they are not sent SIGTERM, too";
  EXPECT_TRUE(supervisor_->gone());
}

TEST_F(SupervisorTest, ReportsAKillByTheOutOfMemoryKiller) {
  const auto report_after = [this](int oom_kills, int status) {
    set_oom_kills(4);
    start_workers();
    set_oom_kills(oom_kills);
    launcher_.end(1001, status);
    return report_;
  };
  EXPECT_THAT(report_after(5, SIGKILL), HasSubstr("out-of-memory killer ended it, the memory limit is 1 GiB"));
  EXPECT_THAT(report_after(4, SIGKILL), Not(HasSubstr("out-of-memory"))) << "another process sent the signal";
  EXPECT_THAT(report_after(5, SIGSEGV), Not(HasSubstr("out-of-memory")));
}

}  // namespace
}  // namespace muster
