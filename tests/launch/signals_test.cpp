#include "muster/launch/signals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

#include "muster/launch/process_tree.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Duration kSignalTimeout = std::chrono::seconds(60);

class SignalPipeTest : public ::testing::Test {
 protected:
  void open() {
    pipe_ = SignalPipe::open(
                *loop_, {SIGUSR1, SIGUSR2}, [this](int number) { signals_.push_back(number); }, [this] { ++ends_; })
                .value();
  }
  bool until(const std::function<bool()>& done) {
    return loop_->run_until(done, Deadline::after(kSignalTimeout)).has_value();
  }

  std::unique_ptr<Loop> loop_ = Loop::create().value();
  std::unique_ptr<SignalPipe> pipe_;
  std::vector<int> signals_;
  int ends_ = 0;
};

TEST_F(SignalPipeTest, ReportsEachSignalOnTheLoop) {
  open();
  ::raise(SIGUSR2);
  ::raise(SIGUSR1);
  EXPECT_THAT(signals_, IsEmpty());
  EXPECT_TRUE(until([&] { return signals_.size() == 2; }));
  EXPECT_THAT(signals_, ElementsAre(SIGUSR2, SIGUSR1));
  EXPECT_EQ(ends_, 0);
}

TEST_F(SignalPipeTest, LeavesIgnoredSignalsIgnored) {
  ::signal(SIGUSR1, SIG_IGN);
  open();
  ::raise(SIGUSR1);
  ::raise(SIGUSR2);
  EXPECT_TRUE(until([&] { return !signals_.empty(); }));
  EXPECT_THAT(signals_, ElementsAre(SIGUSR2));
  ::signal(SIGUSR1, SIG_DFL);
}

TEST(ForwardedSignals, AreHandledWithThoseThatEndTheJob) {
  EXPECT_THAT(handled_signals({SIGTERM, SIGHUP}), ElementsAre(SIGTERM, SIGHUP, SIGUSR1, SIGUSR2));
  EXPECT_THAT(handled_signals({SIGUSR2}), ElementsAre(SIGUSR2, SIGHUP, SIGUSR1));
}

TEST(ForwardedSignals, AreBytesThatNoTextHas) {
  for (const int number : kForwardedSignals) EXPECT_EQ(signal_of_byte(byte_of_signal(number)), number);
  for (const int number : {0, SIGTERM, SIGKILL, 0x7f}) EXPECT_EQ(signal_of_byte(byte_of_signal(number)), 0) << number;
  for (int byte = 0; byte < 0x80; ++byte) EXPECT_EQ(signal_of_byte(static_cast<uint8_t>(byte)), 0) << byte;
}

// Children inherit an ignored SIGCHLD. The kernel then keeps no exit status for waitpid().
TEST_F(SignalPipeTest, ReportsChildrenDespiteAnIgnoredSigchld) {
  ::signal(SIGCHLD, SIG_IGN);
  open();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(5);
  EXPECT_TRUE(until([&] { return ends_ > 0; }));
  const auto reaped = reap_children();
  ASSERT_EQ(reaped.ended.size(), 1u);
  EXPECT_EQ(reaped.ended[0].pid, child);
  EXPECT_EQ(WEXITSTATUS(reaped.ended[0].status), 5);
  pipe_.reset();
  ::signal(SIGCHLD, SIG_DFL);
}

TEST(SignalNames, AreThoseOfTheSystem) {
  // As `kill -l` prints them.
  EXPECT_EQ(signal_name(SIGTERM), "SIGTERM");
  EXPECT_EQ(signal_name(SIGHUP), "SIGHUP");
  EXPECT_EQ(signal_name(SIGSYS), "SIGSYS");
  EXPECT_EQ(signal_name(SIGRTMIN + 2), "SIGRTMIN+2");
  EXPECT_EQ(signal_name(99), "signal 99");
  for (int number = 1; number < 32; ++number) EXPECT_EQ(signal_number(signal_name(number)), number);
}

TEST(SignalNames, AreReadInAnySpelling) {
  EXPECT_EQ(signal_number("SIGUSR1"), SIGUSR1);
  EXPECT_EQ(signal_number("usr1"), SIGUSR1);
  EXPECT_EQ(signal_number("sigUSR1"), SIGUSR1);
  EXPECT_EQ(signal_number("USR3"), std::nullopt);
  EXPECT_EQ(signal_number(""), std::nullopt);
}

}  // namespace
}  // namespace muster
