#include "muster/transport/links/link_table.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

namespace muster {
namespace {

/// Rank 0 of two. Nothing accepts connections at the address of rank 1.
class LinkTableTest : public testing::Test {
 protected:
  void SetUp() override {
    table_.set_endpoint(0, {"rank 0", {getpid(), process_domain()}, {}, Transport::kTcp});
    set_endpoint(getpid());
  }
  void set_endpoint(pid_t pid) {
    table_.set_endpoint(1, {"rank 1", {pid, process_domain()}, "127.0.0.1:1", Transport::kTcp});
  }
  void run_for(Duration time) {
    (void)loop_->run_until([] { return false; }, Deadline::after(time));
  }
  LinkIdentity identity(Rank rank, Subflow subflow = {}) const {
    LinkIdentity identity{rank, 2, "test", 0, {to_bytes("a secret of the tests"), nullptr}, subflow};
    identity.retry_refused = false;
    return identity;
  }

  const std::unique_ptr<Loop> loop_ = Loop::create().value();
  const Deadline patience_ = Deadline::after(std::chrono::seconds(60));
  LinkTable table_{*loop_, identity(0), 1};
};

TEST_F(LinkTableTest, ReportsTheSideOfAnIncompleteLink) {
  LinkTable striped(*loop_, identity(0), 2);
  std::vector<LinkTable::Side> lost;
  striped.set_events({.lost = [&](Rank, LinkTable::Side side, const Error&) { lost.push_back(side); }});
  const auto address = Address::parse(striped.listen(Address::parse("127.0.0.1:0").value(), Transport::kTcp).value());
  std::unique_ptr<Link> first;
  const auto dial = connect_link(*loop_, *address, identity(1, {0, 2}), 0, patience_,
                                 [&](Result<std::unique_ptr<Link>> link) { first = std::move(link).value(); });
  ASSERT_TRUE(loop_->run_until([&] { return first != nullptr; }, patience_));
  first.reset();
  ASSERT_TRUE(loop_->run_until([&] { return !lost.empty(); }, patience_));
  EXPECT_EQ(lost[0], LinkTable::Side::kAccepted);
}

TEST_F(LinkTableTest, MonitorsAProcessUntilBothSidesAreForgotten) {
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  set_endpoint(child);
  bool died = false;
  table_.set_events({.dial_failed = [](Rank, const Error&) { return true; },
                     .died = [&](Rank, const Error& why) { died = why.message == "rank 1 died"; }});
  table_.dial(1, patience_);
  table_.monitor_process(1);
  table_.forget(1, LinkTable::Side::kAccepted);
  kill(child, SIGKILL);
  EXPECT_TRUE(loop_->run_until([&] { return died; }, patience_));
  waitpid(child, nullptr, 0);
}

TEST_F(LinkTableTest, ForgetsARedial) {
  int failures = 0;
  bool redial = true;
  table_.set_events({.dial_failed = [&](Rank, const Error&) {
    ++failures;
    return redial;
  }});
  table_.dial(1, patience_);
  ASSERT_TRUE(loop_->run_until([&] { return failures == 1; }, patience_));
  table_.forget(1, LinkTable::Side::kDialed);
  set_endpoint(getpid());
  redial = false;
  table_.dial(1, patience_);
  run_for(std::chrono::milliseconds(300));
  EXPECT_EQ(failures, 2);
}

TEST_F(LinkTableTest, ForgetsTheEndpointWithItsLastLink) {
  table_.set_events({.dial_failed = [](Rank, const Error&) { return true; }});
  table_.dial(1, patience_);
  table_.forget(1, LinkTable::Side::kAccepted);
  EXPECT_NE(table_.find_endpoint(1), nullptr);
  table_.forget(1, LinkTable::Side::kDialed);
  EXPECT_EQ(table_.find_endpoint(1), nullptr);
  table_.forget(0, LinkTable::Side::kDialed);
  EXPECT_NE(table_.find_endpoint(0), nullptr) << "its own";
}

}  // namespace
}  // namespace muster
