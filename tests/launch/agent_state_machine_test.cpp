#include "muster/launch/agent/agent_state_machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const char* name(NodeEvent::Kind kind) {
  constexpr const char* kNames[] = {"join", "alive", "done", "failed", "stopped",
                                    "end",  "leave", "bye",  "move",   "killed"};
  return kNames[static_cast<int>(kind)];
}

// Records the actions that the state machine requests.
class RecordedActions : public AgentActions {
 public:
  void reconnect() override { asked.emplace_back("reconnect"); }
  void join() override { asked.emplace_back("join"); }
  void send(NodeEvent event) override {
    asked.push_back(std::string("send ") + name(event.kind) + " " + std::to_string(event.generation));
  }
  Result<> start_workers(const Assignment& assignment) override {
    asked.push_back("start " + std::to_string(assignment.generation));
    return start_result;
  }
  void stop_workers(int number) override {
    asked.emplace_back(number == SIGTERM ? "stop" : "stop with signal " + std::to_string(number));
  }
  void kill_workers() override { asked.emplace_back("kill"); }
  void notice(const std::string& text) override { notices.push_back(text); }
  void progress(const std::string& text) override { progress_texts.push_back(text); }

  std::vector<std::string> asked, notices, progress_texts;
  Result<> start_result;
};

class AgentState : public ::testing::Test {
 protected:
  // A node of an elastic job. The root is another node.
  AgentStateMachine state_{actions_, "host", /*elastic=*/true};

  void join(bool moves = true) {
    state_.root_found({.url = "tcp://root:1", .moves = moves});
    take();
  }
  void run(int generation = 0, bool moves = true) {
    join(moves);
    start(generation);
    ASSERT_EQ(state_.phase(), AgentPhase::kRunning);
    take();
  }
  void start(int generation) {
    Assignment assignment;
    assignment.generation = generation;
    state_.job_event({JobEvent::Kind::kStart, generation}, assignment);
  }
  void job_event(JobEvent::Kind kind, int generation = 0, const std::string& text = "") {
    state_.job_event({kind, generation, "", text}, std::nullopt);
  }
  void outcome(int status) {
    state_.job_event({JobEvent::Kind::kOutcome, 0, "", "", {status, status == 0 ? "" : "the job failed"}},
                     std::nullopt);
  }
  void lose_root() { state_.root_lost({ErrorCode::kPeerLost, "no answer", kNoRank, ""}); }
  // Returns the actions since the last call.
  std::vector<std::string> take() { return std::exchange(actions_.asked, {}); }

  RecordedActions actions_;
};

TEST_F(AgentState, RunsOneGenerationToTheEnd) {
  EXPECT_EQ(state_.phase(), AgentPhase::kConnecting);
  state_.root_found({"tcp://root:1"});
  EXPECT_EQ(state_.phase(), AgentPhase::kJoining);
  EXPECT_THAT(take(), ElementsAre("join"));
  start(0);
  EXPECT_EQ(state_.phase(), AgentPhase::kRunning);
  EXPECT_THAT(take(), ElementsAre("start 0"));
  state_.workers_succeeded();
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kRunning) << "the outcome is the root's to say";
  EXPECT_THAT(take(), ElementsAre("send done 0"));
  outcome(0);
  EXPECT_EQ(state_.phase(), AgentPhase::kEnding);
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_THAT(take(), IsEmpty());
  EXPECT_EQ(state_.outcome()->status, 0);
}

TEST_F(AgentState, ReportsAFailureAndWaitsForTheNextGeneration) {
  run();
  state_.worker_failed({7, "rank 1 failed"});
  EXPECT_THAT(take(), ElementsAre("send failed 0"));
  job_event(JobEvent::Kind::kStop, 0, "rank 1 failed");
  EXPECT_EQ(state_.phase(), AgentPhase::kStopping);
  EXPECT_THAT(take(), ElementsAre("stop"));
  EXPECT_THAT(actions_.notices, ElementsAre("rank 1 failed"));
  start(1);
  EXPECT_THAT(take(), IsEmpty()) << "processes of the last generation are left";
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kJoining);
  EXPECT_THAT(take(), ElementsAre("send stopped 0"));
  start(1);
  EXPECT_FALSE(state_.failure());
  EXPECT_THAT(take(), ElementsAre("start 1"));
}

TEST_F(AgentState, IgnoresTheStopOfAnotherGeneration) {
  run(3);
  job_event(JobEvent::Kind::kStop, 2);
  EXPECT_EQ(state_.phase(), AgentPhase::kRunning);
  EXPECT_THAT(take(), IsEmpty());
}

TEST_F(AgentState, StopsWorkersOnAFailedOutcome) {
  run();
  outcome(1);
  EXPECT_EQ(state_.phase(), AgentPhase::kEnding);
  EXPECT_THAT(take(), ElementsAre("stop"));
  job_event(JobEvent::Kind::kStop);
  lose_root();
  EXPECT_THAT(take(), IsEmpty());
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
}

TEST_F(AgentState, SendsTheSameReportOnce) {
  run();
  job_event(JobEvent::Kind::kStop, 0, "the job failed");
  outcome(1);
  EXPECT_THAT(actions_.notices, ElementsAre("the job failed"));
}

TEST_F(AgentState, EndsTheJobWhenWorkersCannotStart) {
  join();
  actions_.start_result = fail(ErrorCode::kNotFound, "no such program");
  start(0);
  EXPECT_THAT(take(), ElementsAre("start 0", "send end 0", "stop"));
  EXPECT_EQ(state_.outcome()->status, 127);
  EXPECT_EQ(state_.outcome()->report, "no such program (host host)");
}

TEST_F(AgentState, JoinsAgainAfterAnEviction) {
  join();
  job_event(JobEvent::Kind::kEvicted);
  EXPECT_EQ(state_.phase(), AgentPhase::kJoining);
  EXPECT_THAT(take(), ElementsAre("join"));
  start(0);
  job_event(JobEvent::Kind::kEvicted);
  EXPECT_EQ(state_.phase(), AgentPhase::kStopping);
  job_event(JobEvent::Kind::kStop);
  take();
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kJoining);
  EXPECT_THAT(take(), ElementsAre("join")) << "the root has forgotten the generation of this node";
}

TEST_F(AgentState, StopsWorkersBeforeItConnectsToTheNextRoot) {
  run();
  lose_root();
  lose_root();
  EXPECT_EQ(state_.phase(), AgentPhase::kStopping);
  EXPECT_THAT(take(), ElementsAre("stop"));
  job_event(JobEvent::Kind::kEvicted);
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kConnecting);
  EXPECT_THAT(take(), ElementsAre("stop", "send stopped 0", "reconnect"));
  lose_root();
  job_event(JobEvent::Kind::kStop);
  start(0);
  EXPECT_EQ(state_.phase(), AgentPhase::kConnecting) << "events of the root that was lost";
  state_.root_found({"tcp://next:1"});
  EXPECT_THAT(take(), ElementsAre("join"));
}

TEST_F(AgentState, EndsWithARootThatIsNotReplaced) {
  run(0, /*moves=*/false);
  state_.worker_failed({7, "rank 1 failed"});
  lose_root();
  EXPECT_EQ(state_.outcome()->status, 7);
  EXPECT_THAT(state_.outcome()->report, HasSubstr("rank 1 failed\n  also lost the job's store at tcp://root:1"));
}

TEST_F(AgentState, ConnectsToAFixedRootWithoutTheProxy) {
  state_.root_found({.url = "tcp://root:1", .direct = false});
  take();
  lose_root();
  EXPECT_THAT(take(), ElementsAre("reconnect"));
  state_.root_not_found({1, "nothing listens there"});
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_THAT(state_.outcome()->report, HasSubstr("lost the job's store at tcp://root:1"));
}

TEST_F(AgentState, LeavesAnElasticJobOnSigterm) {
  run();
  state_.signaled(SIGTERM, false);
  EXPECT_EQ(state_.phase(), AgentPhase::kLeaving);
  EXPECT_THAT(take(), ElementsAre("send leave 0")) << "the root stops all nodes together";
  job_event(JobEvent::Kind::kStop);
  EXPECT_THAT(take(), ElementsAre("stop"));
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_EQ(state_.outcome()->status, 128 + SIGTERM);
}

TEST_F(AgentState, LeavesAtOnceWithoutWorkers) {
  join();
  state_.signaled(SIGTERM, false);
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_THAT(take(), ElementsAre("send leave 0"));
}

TEST_F(AgentState, KillsOnlyItsOwnWorkersWhenASecondSignalComes) {
  run();
  state_.signaled(SIGTERM, false);
  take();
  state_.signaled(SIGTERM, false);
  EXPECT_EQ(state_.phase(), AgentPhase::kStopping);
  EXPECT_THAT(take(), ElementsAre("kill", "stop")) << "no end: the other nodes continue without this one";
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
}

TEST_F(AgentState, LeavesInsteadOfReconnecting) {
  run();
  state_.signaled(SIGTERM, false);
  lose_root();
  take();
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_THAT(take(), ElementsAre("send stopped 0"));
}

TEST_F(AgentState, EndsTheJobOnOtherSignals) {
  run();
  state_.signaled(SIGINT, false);
  EXPECT_EQ(state_.phase(), AgentPhase::kEnding);
  EXPECT_EQ(state_.outcome()->status, 128 + SIGINT);
  EXPECT_THAT(take(), ElementsAre("send end 0", "stop"));
  state_.signaled(SIGINT, false);
  EXPECT_THAT(take(), ElementsAre("kill"));
}

TEST_F(AgentState, EndsWorkersWithASignalThatTheyMayHandle) {
  for (const int number : {SIGHUP, SIGUSR1, SIGUSR2}) {
    AgentStateMachine state(actions_, "host", /*elastic=*/false);
    state.root_found({"tcp://root:1"});
    state.job_event({JobEvent::Kind::kStart, 0}, Assignment());
    take();
    state.signaled(number, false);
    EXPECT_EQ(state.outcome()->status, 128 + number);
    EXPECT_THAT(take(), ElementsAre("send end 0", "stop with signal " + std::to_string(number)));
  }
}

TEST_F(AgentState, EndsTheJobOnSigtermAtTheRoot) {
  state_.root_found({"tcp://root:1", /*is_here=*/true});
  state_.signaled(SIGTERM, false);
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_THAT(take(), ElementsAre("join", "send end 0"));
}

TEST_F(AgentState, HandsOverOnSigtermAtARootThatMayLeave) {
  state_.root_found({.url = "tcp://root:1", .is_here = true, .may_leave = true});
  start(0);
  take();
  state_.signaled(SIGTERM, false);
  EXPECT_EQ(state_.phase(), AgentPhase::kLeaving);
  EXPECT_THAT(take(), ElementsAre("send leave 0"));
  job_event(JobEvent::Kind::kStop);
  EXPECT_FALSE(state_.hands_over()) << "its workers may write a checkpoint";
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_TRUE(state_.hands_over());
  EXPECT_EQ(state_.outcome()->status, 128 + SIGTERM);
}

TEST_F(AgentState, FollowsARootThatLeaves) {
  run();
  job_event(JobEvent::Kind::kMoved);
  EXPECT_EQ(state_.phase(), AgentPhase::kStopping);
  EXPECT_THAT(take(), ElementsAre("stop"));
  EXPECT_THAT(actions_.notices, ElementsAre(HasSubstr("tcp://root:1 leaves")));
  lose_root();
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kConnecting);
  EXPECT_THAT(take(), ElementsAre("send stopped 0", "reconnect"));
  join();
  job_event(JobEvent::Kind::kMoved);
  EXPECT_THAT(take(), ElementsAre("reconnect")) << "there are no workers to stop";
}

TEST_F(AgentState, HandsOverNothingIfTooFewNodesAreLeft) {
  state_.root_found({.url = "tcp://root:1", .is_here = true, .may_leave = true});
  start(0);
  state_.signaled(SIGTERM, false);
  outcome(143);
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_FALSE(state_.hands_over()) << "the other nodes must hear the outcome";
}

TEST_F(AgentState, ANodeThatIsNotTheRootHandsOverNothing) {
  run();
  state_.signaled(SIGTERM, false);
  job_event(JobEvent::Kind::kStop);
  state_.workers_gone();
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  EXPECT_FALSE(state_.hands_over());
}

TEST_F(AgentState, KillsWorkersWhenItsMonitorWasKilled) {
  run();
  state_.signaled(SIGTERM, true);
  EXPECT_THAT(take(), ElementsAre("kill", "send end 0", "stop"));
  EXPECT_EQ(state_.outcome()->report, "`muster run` was killed on host host");
}

TEST_F(AgentState, ShowsProgressOnlyWithoutWorkers) {
  join();
  job_event(JobEvent::Kind::kProgress, -1, "1 of 2 nodes are here");
  start(0);
  job_event(JobEvent::Kind::kProgress, -1, "2 of 2 nodes are here");
  EXPECT_THAT(actions_.progress_texts, ElementsAre("1 of 2 nodes are here"));
}

TEST_F(AgentState, IgnoresARootThatIsFoundAfterTheOutcome) {
  outcome(1);
  EXPECT_EQ(state_.phase(), AgentPhase::kDone);
  state_.root_found({"tcp://root:1"});
  EXPECT_THAT(take(), IsEmpty());
}

}  // namespace
}  // namespace muster
