// Nodes that join a running job, and failures in a row: when the next generation starts.
#include "launch/rendezvous_fixture.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = JobEvent::Kind;

TEST_F(Rendezvouses, NodesThatJoinSoonAfterEachOtherCauseOneRestart) {
  options_.last_call = 0s;
  options_.join_delay = 3s;
  make(1, 5);
  EXPECT_THAT(join("a"), Are(Kind::kStart));
  EXPECT_THAT(join("b"), IsEmpty());
  EXPECT_THAT(wait_alive(2s, {"a", "b"}), IsEmpty());
  EXPECT_THAT(join("c"), IsEmpty());
  const auto stop = wait_alive(1s, {"a", "b", "c"});
  ASSERT_THAT(stop, Are(Kind::kStop));
  EXPECT_EQ(stop.front().text, "2 nodes join the job");
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), Are(Kind::kStart));
  EXPECT_EQ(order(), "abc");
  EXPECT_THAT(wait_alive(5s, {"a", "b", "c"}), IsEmpty());
}

TEST_F(Rendezvouses, TheLastNodeThatHasRoomJoinsAtOnce) {
  options_.last_call = 0s;
  options_.join_delay = 3s;
  make(1, 3);
  join("a");
  EXPECT_THAT(join("b"), IsEmpty());
  EXPECT_THAT(join("c"), Are(Kind::kStop)) << "no further node can join";
}

TEST_F(Rendezvouses, ANodeThatLeavesBeforeItJoinsCausesNoRestart) {
  options_.last_call = 0s;
  options_.join_delay = 3s;
  make(1, 3);
  join("a");
  join("b");
  send(NodeEvent::Kind::kBye, "b");
  EXPECT_THAT(wait_alive(5s, {"a"}), IsEmpty());
  EXPECT_GT(rendezvous_->next_tick().ns, now_.ns);
}

TEST_F(Rendezvouses, QuickFailuresInARowRestartAfterAPause) {
  options_.restart_delay = 5s;
  make(1, 1, /*max_restarts=*/100);
  join("a");
  const auto fail_once = [this] {
    send(NodeEvent::Kind::kFailed, "a", "again");
    return send(NodeEvent::Kind::kStopped, "a");
  };
  EXPECT_THAT(fail_once(), Are(Kind::kStart)) << "the first failure";
  for (const int pause : {1, 2, 4, 5, 5}) {
    const auto events = fail_once();
    ASSERT_THAT(events, Are(Kind::kProgress));
    EXPECT_THAT(events.front().text, HasSubstr("restarting in " + std::to_string(pause) + " s"));
    EXPECT_GT(rendezvous_->next_tick().ns, now_.ns);
    if (pause > 1) {
      EXPECT_THAT(wait_alive(std::chrono::seconds(pause - 1), {"a"}), IsEmpty());
    }
    EXPECT_THAT(wait_alive(1s, {"a"}), Are(Kind::kStart));
  }
  wait_alive(10s, {"a"});
  EXPECT_THAT(fail_once(), Are(Kind::kStart)) << "this generation ran for a while";
  EXPECT_THAT(fail_once(), Are(Kind::kStart)) << "the first quick failure since";
}

TEST_F(Rendezvouses, ThePauseIsNoPartOfTheJoinTimeout) {
  options_.restart_delay = 30s;
  options_.join_timeout = 500ms;
  make(1, 1, /*max_restarts=*/3);
  join("a");
  for (int i = 0; i < 2; ++i) {
    send(NodeEvent::Kind::kFailed, "a", "again");
    send(NodeEvent::Kind::kStopped, "a");
  }
  EXPECT_THAT(wait_alive(1s, {"a"}), Are(Kind::kStart));
}

}  // namespace
}  // namespace muster
