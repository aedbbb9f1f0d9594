#include "muster/launch/rendezvous/rendezvous.h"

#include "launch/rendezvous_fixture.h"

namespace muster {
namespace {

using ::testing::Each;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Kind = JobEvent::Kind;

TEST_F(Rendezvouses, RanksFollowFromEveryNodesOwnCount) {
  make(3, 3);
  EXPECT_THAT(join("c", 2, 3), IsEmpty());
  EXPECT_THAT(join("a", 0, 1), IsEmpty());
  EXPECT_THAT(join("b", 1, 2), Are(Kind::kStart));
  EXPECT_EQ(order(), "abc");
  int i = 0;
  for (const auto& [id, assignment] : rendezvous_->assignments()) {
    EXPECT_EQ(assignment.placement.node_rank, i);
    EXPECT_EQ(assignment.placement.nproc, i + 1);
    EXPECT_EQ(assignment.placement.first_rank, i * (i + 1) / 2);
    EXPECT_EQ(assignment.placement.world_size, 6);
    EXPECT_EQ(assignment.generation, 0);
    EXPECT_EQ(assignment.node0_addr, "address-of-a");
    ++i;
  }
}

TEST_F(Rendezvouses, NodesWithoutARankTakeFreeRanks) {
  make(4, 4);
  join("x");
  join("b", 1);
  join("y");
  join("a", 0);
  EXPECT_EQ(order(), "abxy");
}

TEST_F(Rendezvouses, RefusesADuplicateRankOfALiveNode) {
  make(2, 2);
  join("a", 1);
  EXPECT_THAT(join("b", 1), IsEmpty());
  const auto events = send(NodeEvent::Kind::kAlive, "a");
  ASSERT_THAT(events, Are(Kind::kRefused));
  EXPECT_EQ(events.front().id, "b");
  EXPECT_THAT(events.front().text, HasSubstr("node rank 1 is taken by host host-a"));
  EXPECT_THAT(join("c", 0), Are(Kind::kStart));
}

TEST_F(Rendezvouses, FreesTheRankOfAKilledAgentAtOnce) {
  make(2, 2, /*max_restarts=*/1);
  join("a", 0);
  join("b", 1);
  join("again", 1);
  const auto events = send(NodeEvent::Kind::kKilled, "b");
  ASSERT_THAT(events, Are(Kind::kStop));
  EXPECT_THAT(events.front().text, HasSubstr("lost host host-b (agent's pid 100): its agent was killed"));
  EXPECT_THAT(send(NodeEvent::Kind::kKilled, "b"), IsEmpty());
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), Are(Kind::kStart));
  EXPECT_EQ(order(), "aagain");
}

TEST_F(Rendezvouses, ANewAgentTakesTheRankOfADeadOne) {
  make(2, 2, /*max_restarts=*/1);
  join("a", 0);
  join("b", 1);
  join("again", 1);
  const auto events = wait_alive(15s, {"a", "again"});
  ASSERT_FALSE(events.empty());
  EXPECT_THAT(events.front().text, HasSubstr("lost host host-b"));
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), Are(Kind::kStart));
  EXPECT_EQ(order(), "aagain");
}

TEST_F(Rendezvouses, NodesThatDisagreeAboutTheirNumberAreRefused) {
  make(2, 3);
  NodeEvent other{NodeEvent::Kind::kJoin, "b"};
  other.node = {"b", "h", "", 1, 1, 2, 4};
  const auto events = rendezvous_->handle(other, now_);
  ASSERT_THAT(events, Are(Kind::kRefused));
  EXPECT_THAT(events.front().text, HasSubstr("--nnodes 2:4"));
  EXPECT_THAT(events.front().text, HasSubstr("--nnodes 2:3"));
}

TEST_F(Rendezvouses, NodesThatDisagreeAboutTheRestartsAreRefused) {
  make(2, 2, /*max_restarts=*/3);
  NodeEvent other{NodeEvent::Kind::kJoin, "b"};
  other.node = {"b", "h", "", 1, 1, 2, 2};
  other.node.max_restarts = 1;
  const auto events = rendezvous_->handle(other, now_);
  ASSERT_THAT(events, Are(Kind::kRefused));
  EXPECT_THAT(events.front().text,
              HasSubstr("started with --max-restarts 1, but the job's root with --max-restarts 3"));
}

TEST_F(Rendezvouses, RefusesASurplusNode) {
  make(1, 1);
  join("a");
  const auto events = join("b");
  ASSERT_THAT(events, Are(Kind::kRefused));
  EXPECT_THAT(events.front().text, HasSubstr("all 1 nodes of the job have joined already"));
}

TEST_F(Rendezvouses, ReportsMissingNodesToWaitingNodes) {
  options_.join_timeout = 100s;
  make(5, 5);
  join("a", 0);
  join("d", 3);
  const auto events = wait_alive(4s, {"a", "d"});
  ASSERT_THAT(events, Are(Kind::kProgress));
  EXPECT_EQ(events.front().text, "2 of 5 nodes are here; missing: 1, 2, 4");
  const auto end = wait_alive(100s, {"a", "d"});
  ASSERT_EQ(end.back().kind, Kind::kOutcome);
  EXPECT_THAT(end.back().outcome.report, HasSubstr("of 5 nodes, nodes 1, 2, 4 did not come within 100 s"));
}

TEST_F(Rendezvouses, CountsTheNodesOfAnElasticJob) {
  make(1, 2);
  join("a");
  EXPECT_EQ(rendezvous_->progress(), "1 of at most 2 nodes are here; waiting for more");
  join("b");
  EXPECT_EQ(rendezvous_->progress(), "2 of at most 2 nodes are here");
  join("c");
  EXPECT_EQ(rendezvous_->progress(), "2 of at most 2 nodes are here, and 1 spare");
}

TEST_F(Rendezvouses, CountsTheWorkersOfAJobThatStarts) {
  make(1, 1);
  const auto events = join("a");
  ASSERT_THAT(events, Are(Kind::kStart));
  EXPECT_EQ(events.front().text, "1 node, 1 worker");
}

TEST_F(Rendezvouses, ReportsMissingNodesToAReplacement) {
  options_.join_timeout = 100s;
  make(5, 5);
  join("a", 0);
  join("d", 3);
  ASSERT_THAT(wait_alive(4s, {"a", "d"}), Are(Kind::kProgress));
  EXPECT_THAT(wait_alive(4s, {"a", "d"}), IsEmpty());
  send(NodeEvent::Kind::kBye, "d");
  join("e", 3);
  ASSERT_THAT(wait_alive(4s, {"a", "e"}), Are(Kind::kProgress));
}

TEST_F(Rendezvouses, TheJobEndsWellWhenTheLastNodeDoes) {
  make(2, 2);
  join("a");
  join("b");
  EXPECT_THAT(send(NodeEvent::Kind::kDone, "a"), IsEmpty());
  const auto events = send(NodeEvent::Kind::kDone, "b");
  ASSERT_THAT(events, Are(Kind::kOutcome));
  EXPECT_EQ(events.front().outcome.status, 0);
  send(NodeEvent::Kind::kBye, "a");
  EXPECT_FALSE(rendezvous_->all_left());
  send(NodeEvent::Kind::kBye, "b");
  EXPECT_TRUE(rendezvous_->all_left());
}

TEST_F(Rendezvouses, WithoutRestartsTheFirstFailureIsTheOutcome) {
  make(2, 2);
  join("a");
  join("b");
  const auto events = send(NodeEvent::Kind::kFailed, "b", "rank 1 failed", 3);
  ASSERT_THAT(events, Are(Kind::kOutcome));
  EXPECT_EQ(events.front().outcome.status, 3);
  EXPECT_EQ(events.front().outcome.report, "rank 1 failed");
  EXPECT_THAT(send(NodeEvent::Kind::kFailed, "a", "rank 0 failed too"), IsEmpty());
}

TEST_F(Rendezvouses, TwoFailuresAtOnceAreOneRestart) {
  make(2, 2, /*max_restarts=*/1);
  join("a");
  join("b");
  EXPECT_THAT(send(NodeEvent::Kind::kFailed, "a", "first"), Are(Kind::kStop));
  EXPECT_THAT(send(NodeEvent::Kind::kFailed, "b", "second"), IsEmpty());
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), IsEmpty());
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "b"), Are(Kind::kStart));
  EXPECT_EQ(rendezvous_->generation(), 1);
  EXPECT_EQ(rendezvous_->restarts(), 1);
  EXPECT_EQ(rendezvous_->assignments().front().second.restarts, 1);
  EXPECT_THAT(send(NodeEvent::Kind::kFailed, "b", "third"), Are(Kind::kOutcome));
}

TEST_F(Rendezvouses, RestartsAFinishedNodeWithTheOthers) {
  make(2, 2, /*max_restarts=*/1);
  join("a");
  join("b");
  send(NodeEvent::Kind::kDone, "a");
  EXPECT_THAT(send(NodeEvent::Kind::kFailed, "b", "late"), Are(Kind::kStop));
  send(NodeEvent::Kind::kStopped, "b");
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), Are(Kind::kStart));
}

TEST_F(Rendezvouses, IgnoresEventsOfAnOldGeneration) {
  make(1, 1, /*max_restarts=*/3);
  join("a");
  send(NodeEvent::Kind::kFailed, "a", "one");
  send(NodeEvent::Kind::kStopped, "a");
  ASSERT_EQ(rendezvous_->generation(), 1);
  for (const auto kind : {NodeEvent::Kind::kFailed, NodeEvent::Kind::kDone, NodeEvent::Kind::kStopped})
    EXPECT_THAT(rendezvous_->handle({kind, "a", 0}, now_), IsEmpty());
  EXPECT_EQ(rendezvous_->restarts(), 1);
}

TEST_F(Rendezvouses, AnElasticJobWaitsBrieflyForMoreNodes) {
  options_.last_call = 30s;
  make(2, 4);
  join("a");
  EXPECT_THAT(join("b"), IsEmpty());
  const auto events = wait_alive(31s, {"a", "b"});
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.back().kind, Kind::kStart);
  EXPECT_EQ(order(), "ab");
}

TEST_F(Rendezvouses, TheLastCallCountsFromWhenThereAreEnoughNodes) {
  options_.last_call = 30s;
  make(2, 4);
  join("a");
  join("b");
  wait_alive(12s, {"a"});  // b is lost
  EXPECT_THAT(wait_alive(60s, {"a"}), Each(Field(&JobEvent::kind, Kind::kProgress)));
  EXPECT_GT(rendezvous_->next_tick().ns, now_.ns) << "nothing is to be done before";
  EXPECT_THAT(join("c"), IsEmpty()) << "there may be more to come";
  const auto events = wait_alive(31s, {"a", "c"});
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.back().kind, Kind::kStart);
  send(NodeEvent::Kind::kStopped, "a");
  wait_alive(12s, {"a"});  // c is lost, long after the last call
  EXPECT_GT(rendezvous_->next_tick().ns, now_.ns);
}

TEST_F(Rendezvouses, ALateNodeJoinsTheNextGeneration) {
  options_.last_call = 0s;
  make(1, 3);
  EXPECT_THAT(join("a"), Are(Kind::kStart));
  const auto stop = join("b");
  ASSERT_THAT(stop, Are(Kind::kStop));
  EXPECT_THAT(stop.front().text, HasSubstr("host-b"));
  EXPECT_THAT(join("c"), IsEmpty());
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), Are(Kind::kStart));
  EXPECT_EQ(order(), "abc");
  EXPECT_EQ(rendezvous_->restarts(), 0) << "a change of membership is no restart";
  EXPECT_THAT(join("d"), IsEmpty()) << "there is no room";
}

TEST_F(Rendezvouses, SurvivorsKeepTheirOrderAndASpareJoins) {
  options_.last_call = 0s;
  make(2, 3);
  join("a");
  join("b");
  send(NodeEvent::Kind::kStopped, "a");
  join("c");
  for (const char* id : {"a", "b"}) send(NodeEvent::Kind::kStopped, id);
  ASSERT_EQ(order(), "abc");
  join("spare");
  wait_alive(5s, {"a", "c", "spare"});
  const auto lost = wait_alive(6s, {"a", "c", "spare"});
  ASSERT_THAT(lost, Are(Kind::kStop));
  EXPECT_THAT(lost.front().text, HasSubstr("lost host host-b"));
  send(NodeEvent::Kind::kStopped, "c");
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), Are(Kind::kStart));
  EXPECT_EQ(order(), "asparec");
}

TEST_F(Rendezvouses, AFailureAfterALostNodeIsNoRestart) {
  options_.last_call = 0s;
  make(1, 2);
  join("a");
  join("b");
  send(NodeEvent::Kind::kStopped, "a");
  ASSERT_EQ(order(), "ab");
  EXPECT_THAT(send(NodeEvent::Kind::kFailed, "a", "lost its peer"), Are(Kind::kStop));
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), IsEmpty()) << "b may yet be well";
  const auto events = wait_alive(12s, {"a"});
  ASSERT_THAT(events, Are(Kind::kStart));
  EXPECT_EQ(order(), "a");
  EXPECT_EQ(rendezvous_->restarts(), 0);
}

TEST_F(Rendezvouses, AFailureWithoutRestartsEndsAnElasticJob) {
  options_.last_call = 0s;
  make(1, 2);
  join("a");
  send(NodeEvent::Kind::kFailed, "a", "its own fault", 7);
  const auto events = send(NodeEvent::Kind::kStopped, "a");
  ASSERT_THAT(events, Are(Kind::kOutcome));
  EXPECT_EQ(events.front().outcome.status, 7);
}

TEST_F(Rendezvouses, ALostNodeEndsAJobThatNeedsIt) {
  make(2, 2);
  join("a");
  join("b");
  const auto events = wait_alive(12s, {"a"});
  ASSERT_THAT(events, Are(Kind::kOutcome));
  EXPECT_THAT(events.front().outcome.report, HasSubstr("lost host host-b (agent's pid 100): no heartbeat for 10 s"));
}

TEST_F(Rendezvouses, TooFewNodesForTooLongEndAnElasticJob) {
  options_.join_timeout = 50s;
  options_.last_call = 0s;
  make(2, 3);
  join("a");
  join("b");
  wait_alive(12s, {"a"});
  send(NodeEvent::Kind::kStopped, "a");
  const auto events = wait_alive(51s, {"a"});
  ASSERT_EQ(events.back().kind, Kind::kOutcome);
  EXPECT_THAT(events.back().outcome.report, HasSubstr("of at least 2 nodes (--nnodes 2:3) only 1 came within 50 s"));
}

TEST_F(Rendezvouses, ANodeMayLeaveAnElasticJob) {
  options_.last_call = 0s;
  make(1, 3);
  join("a");
  join("b");
  send(NodeEvent::Kind::kStopped, "a");
  EXPECT_THAT(send(NodeEvent::Kind::kLeave, "a", "SIGTERM"), Are(Kind::kStop));
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "b"), IsEmpty());
  EXPECT_THAT(send(NodeEvent::Kind::kStopped, "a"), IsEmpty()) << "no generation begins with one that leaves";
  EXPECT_THAT(send(NodeEvent::Kind::kBye, "a"), Are(Kind::kStart));
  EXPECT_EQ(order(), "b");
  const auto last = send(NodeEvent::Kind::kLeave, "b", "SIGTERM", 143);
  ASSERT_THAT(last, Are(Kind::kOutcome)) << "no node would be left";
  EXPECT_EQ(last.front().outcome.status, 143);
}

TEST_F(Rendezvouses, NodesThatLeaveTogetherEndTheJob) {
  options_.last_call = 0s;
  make(2, 3);
  join("a");
  join("b");
  join("c");
  for (const char* id : {"a", "b"}) send(NodeEvent::Kind::kStopped, id);
  ASSERT_EQ(order(), "abc");
  EXPECT_THAT(send(NodeEvent::Kind::kLeave, "a", "SIGTERM", 143), Are(Kind::kStop));
  const auto last = send(NodeEvent::Kind::kLeave, "b", "SIGTERM", 143);
  ASSERT_THAT(last, Are(Kind::kOutcome)) << "one node would be left";
  EXPECT_EQ(last.front().outcome.status, 143);
}

TEST_F(Rendezvouses, AStalledRootEvictsNoNode) {
  make(2, 2);
  join("a");
  join("b");
  EXPECT_THAT(wait(3600s), IsEmpty());
  EXPECT_THAT(wait_alive(5s, {"a", "b"}), IsEmpty());
}

TEST_F(Rendezvouses, AnEvictedNodeIsToldToJoinAgain) {
  options_.last_call = 0s;
  make(1, 2);
  join("a");
  join("b");
  send(NodeEvent::Kind::kStopped, "a");
  ASSERT_EQ(order(), "ab");
  ASSERT_THAT(wait_alive(12s, {"a"}), Are(Kind::kStop));
  send(NodeEvent::Kind::kStopped, "a");
  const auto forgotten = send(NodeEvent::Kind::kAlive, "b");
  ASSERT_THAT(forgotten, Are(Kind::kEvicted));
  EXPECT_EQ(forgotten.front().id, "b");
  EXPECT_THAT(join("b", {}, 1, 1, 2), Are(Kind::kStop));
}

TEST_F(Rendezvouses, ANewRootContinuesWithTheRemainingNodes) {
  options_.last_call = 1000s;
  make(2, 4, 0, /*first_generation=*/6);
  join("d", {}, 1, 3, 4);
  join("b", {}, 1, 1, 4);
  const auto events = join("c", {}, 1, 2, 4);
  ASSERT_THAT(events, Are(Kind::kStart));
  EXPECT_EQ(events.front().generation, 6);
  EXPECT_EQ(order(), "bcd");
}

TEST_F(Rendezvouses, ARootThatLeavesTellsAllNodesToMove) {
  make(1, 3);
  join("a");
  join("b");
  join("c");
  send(NodeEvent::Kind::kLeave, "a");
  for (const char* id : {"a", "b", "c"}) send(NodeEvent::Kind::kStopped, id);
  EXPECT_THAT(send(NodeEvent::Kind::kMove, "a"), Are(JobEvent::Kind::kMoved));
  EXPECT_THAT(send(NodeEvent::Kind::kMove, "a"), IsEmpty());
  EXPECT_FALSE(rendezvous_->over());
  EXPECT_FALSE(rendezvous_->all_left());
  const auto told = join("d");
  ASSERT_THAT(told, Are(JobEvent::Kind::kMoved));
  EXPECT_EQ(told.front().id, "d");
  send(NodeEvent::Kind::kBye, "d");
  send(NodeEvent::Kind::kLeave, "b");
  EXPECT_FALSE(rendezvous_->all_left());
  EXPECT_THAT(send(NodeEvent::Kind::kBye, "c"), IsEmpty());
  EXPECT_TRUE(rendezvous_->all_left()) << "a and b leave the job, and need no other root";
  EXPECT_THAT(wait(1000s), IsEmpty());
}

TEST_F(Rendezvouses, RolesAreCountedOnTheirOwn) {
  make(3, 3);
  for (const auto& [id, role, nproc] : {std::tuple{"a", "actor", 2}, {"b", "learner", 3}, {"c", "actor", 4}}) {
    NodeEvent event{NodeEvent::Kind::kJoin, id};
    event.node = {id, "h", "", 1, nproc, 3, 3, role};
    rendezvous_->handle(event, now_);
  }
  const auto& assignments = rendezvous_->assignments();
  ASSERT_EQ(assignments.size(), 3u);
  EXPECT_EQ(assignments[2].second.placement.first_rank, 5);
  EXPECT_EQ(assignments[2].second.placement.first_role_rank, 2);
  EXPECT_EQ(assignments[2].second.placement.role_world_size, 6);
  EXPECT_EQ(assignments[1].second.placement.role_world_size, 3);
}

TEST_F(Rendezvouses, ReportsTheOutcomeToALateNode) {
  make(2, 2);
  send(NodeEvent::Kind::kEnd, "unknown", "no such script", 127);
  const auto events = join("a");
  ASSERT_THAT(events, Are(Kind::kOutcome));
  EXPECT_EQ(events.front().outcome.status, 127);
}

TEST(RendezvousMessages, AreReadAsTheyWereWritten) {
  NodeEvent event{NodeEvent::Kind::kJoin, "id", 3};
  event.node = {"id", "h\xff", "boot/pid:1", 7, 4, 2, 5, "role", 1, 3, 4};
  const NodeEvent read = parse_node_event(encode(event)).value();
  EXPECT_EQ(read.node.wanted, 1);
  EXPECT_EQ(read.node.nproc, 4);
  EXPECT_EQ(read.node.last_nnodes, 4);
  EXPECT_EQ(read.generation, 3);
  Assignment assignment;
  assignment.node0_addr = "::1";
  EXPECT_EQ(parse_assignment(encode(assignment)).value().node0_addr, "::1");
  const JobEvent outcome = parse_job_event(encode(JobEvent{Kind::kOutcome, 2, "", "", {9, "why"}})).value();
  EXPECT_EQ(outcome.outcome.status, 9);
  EXPECT_EQ(outcome.outcome.report, "why");
  EXPECT_EQ(parse_job_event(encode(JobEvent{Kind::kRefused, -1, "id", "before the first"})).value().generation, -1);
}

TEST(RendezvousMessages, OfAnotherShapeAreRefused) {
  for (const char* text : {"", "[]", "{}", "\xff", R"({"is":"join","id":"x","generation":0})",
                           R"({"is":"alive","id":"x","generation":-1})", R"({"is":"alive","id":7,"generation":1})"})
    EXPECT_EQ(parse_node_event(as_bytes(text)).error().code, ErrorCode::kProtocol) << text;
  EXPECT_FALSE(parse_assignment(as_bytes(R"({"nnodes":2,"node":2})")));
  EXPECT_FALSE(parse_job_event(as_bytes(R"({"is":"events"})")));
}

}  // namespace
}  // namespace muster
