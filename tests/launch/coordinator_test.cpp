#include "muster/launch/rendezvous/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <future>
#include <tuple>

#include "muster/launch/rendezvous/rendezvous_client.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using Kind = JobEvent::Kind;

constexpr Duration kCoordinatorTimeout = std::chrono::seconds(60);

Deadline soon() { return Deadline::after(kCoordinatorTimeout); }

// An agent without processes. It keeps the events that it receives until the test asks for them.
class FakeAgent {
 public:
  FakeAgent(Store& store, const std::string& id, int min_nodes, int max_nodes, int max_restarts) : id_(id) {
    RendezvousClient::Events events;
    events.job_event = [this](const JobEvent& event, const std::optional<Assignment>& assignment) {
      const std::lock_guard lock(mutex_);
      if (event.kind != Kind::kProgress) events_.emplace_back(event, assignment);
      changed_.notify_all();
    };
    events.lost = [](const Error&) {};
    client_ =
        RendezvousClient::start(store.clone().value(), {"run", id, kCoordinatorTimeout}, std::move(events)).value();
    NodeInfo node{id, "host-" + id, "", 1, 2, min_nodes, max_nodes};
    node.max_restarts = max_restarts;
    client_->join(node);
  }

  std::pair<JobEvent, std::optional<Assignment>> next() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kCoordinatorTimeout, [this] { return !events_.empty(); }))
      ADD_FAILURE() << id_ << " received no event";
    if (events_.empty()) return {};
    auto first = events_.front();
    events_.pop_front();
    return first;
  }
  Assignment start() {
    auto [event, assignment] = next();
    // All agents receive the start and the stop of a generation, even if they are not in it.
    while (!current_ && !assignment && (event.kind == Kind::kStop || event.kind == Kind::kStart))
      std::tie(event, assignment) = next();
    EXPECT_EQ(event.kind, Kind::kStart) << event.text;
    return current_.emplace(assignment.value_or(Assignment{}));
  }
  void send(NodeEvent::Kind kind, const std::string& report = "") {
    NodeEvent sent{kind, id_, current_ ? current_->generation : 0};
    sent.outcome = {1, report};
    client_->send(sent);
  }
  bool flush() { return client_->flush(soon()); }

 private:
  const std::string id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<JobEvent, std::optional<Assignment>>> events_;
  std::optional<Assignment> current_;
  std::unique_ptr<RendezvousClient> client_;  // last, because its threads use the fields above
};

class Coordinators : public ::testing::Test {
 protected:
  void start(int min_nodes, int max_nodes, int max_restarts, Coordinator::Failover failover = {}) {
    RendezvousOptions options;
    options.min_nodes = min_nodes;
    options.max_nodes = max_nodes;
    options.max_restarts = max_restarts;
    options.last_call = Duration::zero();
    options.heartbeat_timeout = kCoordinatorTimeout;
    max_restarts_ = max_restarts;
    coordinator_ = Coordinator::start(store_->clone().value(), "run", options, failover, [this](const Error& why) {
                     failed_.set_value(why);
                   }).value();
  }
  void add(const std::string& id, int min_nodes, int max_nodes) {
    agents_.push_back(std::make_unique<FakeAgent>(*store_, id, min_nodes, max_nodes, max_restarts_));
  }
  void leave_job() {
    for (auto& agent : agents_) agent->send(NodeEvent::Kind::kBye);
    EXPECT_TRUE(coordinator_->await_all_left(0, soon()));
  }

  int max_restarts_ = 0;
  std::promise<Error> failed_;
  std::unique_ptr<Store> store_ = memory_store();
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<std::unique_ptr<FakeAgent>> agents_;
};

TEST_F(Coordinators, RestartAllNodesOnceWhenTwoFailAtOnce) {
  constexpr int kNodes = 8;
  start(kNodes, kNodes, /*max_restarts=*/1);
  for (int i = 0; i < kNodes; ++i) add(std::to_string(i), kNodes, kNodes);
  for (auto& agent : agents_) EXPECT_EQ(agent->start().placement.world_size, 2 * kNodes);
  ASSERT_TRUE(store_->set(generation_prefix(0) + "address/0", as_bytes("dead"), soon()));
  agents_[2]->send(NodeEvent::Kind::kFailed, "one");
  agents_[5]->send(NodeEvent::Kind::kFailed, "other");
  for (auto& agent : agents_) {
    EXPECT_EQ(agent->next().first.kind, Kind::kStop);
    agent->send(NodeEvent::Kind::kStopped);
  }
  for (auto& agent : agents_) {
    const Assignment assignment = agent->start();
    EXPECT_EQ(assignment.generation, 1);
    EXPECT_EQ(assignment.restarts, 1);
  }
  for (auto& agent : agents_) agent->send(NodeEvent::Kind::kDone);
  for (auto& agent : agents_) EXPECT_EQ(agent->next().first.kind, Kind::kOutcome);
  leave_job();
}

TEST_F(Coordinators, DeleteTheKeysOfADeadGeneration) {
  start(1, 1, /*max_restarts=*/1);
  add("a", 1, 1);
  agents_[0]->start();
  for (int i = 0; i < 1000; ++i)
    ASSERT_TRUE(store_->set(generation_prefix(0) + std::to_string(i), as_bytes("dead"), soon()));
  agents_[0]->send(NodeEvent::Kind::kFailed, "one");
  agents_[0]->next();
  agents_[0]->send(NodeEvent::Kind::kStopped);
  agents_[0]->start();
  const Deadline deadline = soon();
  while (!store_->list_keys(generation_prefix(0), deadline).value().empty() && !deadline.passed())
    std::this_thread::yield();
  EXPECT_FALSE(deadline.passed());
  agents_[0]->send(NodeEvent::Kind::kDone);
  EXPECT_EQ(agents_[0]->next().first.kind, Kind::kOutcome);
  leave_job();
}

TEST_F(Coordinators, AddAndRemoveNodesOfAnElasticJob) {
  start(1, 3, /*max_restarts=*/0);
  add("a", 1, 3);
  EXPECT_EQ(agents_[0]->start().placement.nnodes, 1);
  add("b", 1, 3);
  EXPECT_THAT(agents_[0]->next().first.text, HasSubstr("host-b"));
  agents_[0]->send(NodeEvent::Kind::kStopped);
  for (int i : {0, 1}) EXPECT_EQ(agents_[static_cast<size_t>(i)]->start().placement.node_rank, i);
  agents_[0]->send(NodeEvent::Kind::kLeave, "it is taken away");
  for (auto& agent : agents_) {
    EXPECT_EQ(agent->next().first.kind, Kind::kStop);
    agent->send(NodeEvent::Kind::kStopped);
  }
  agents_[0]->send(NodeEvent::Kind::kBye);
  // When the second agent stopped, the root may still have counted the first agent. Then there is one more generation.
  Assignment last = agents_[1]->start();
  while (last.placement.nnodes != 1) {
    EXPECT_EQ(agents_[1]->next().first.kind, Kind::kStop);
    agents_[1]->send(NodeEvent::Kind::kStopped);
    last = agents_[1]->start();
  }
  agents_[1]->send(NodeEvent::Kind::kDone);
  EXPECT_EQ(agents_[1]->next().first.kind, Kind::kOutcome);
  agents_[1]->send(NodeEvent::Kind::kBye);
  EXPECT_TRUE(coordinator_->await_all_left(0, soon()));
}

TEST_F(Coordinators, SayAfterAllEventsWhetherTheJobIsOver) {
  start(2, 3, /*max_restarts=*/0);
  add("a", 2, 3);
  add("b", 2, 3);
  for (auto& agent : agents_) agent->start();
  EXPECT_FALSE(coordinator_->await_over(soon()));
  agents_[0]->send(NodeEvent::Kind::kLeave, "it is taken away");
  ASSERT_TRUE(agents_[0]->flush());
  EXPECT_TRUE(coordinator_->await_over(soon())) << "fewer than two nodes are left";
  for (auto& agent : agents_) EXPECT_EQ(agent->next().first.outcome.report, "it is taken away");
  leave_job();
}

TEST_F(Coordinators, PersistTheRestartCount) {
  const auto persisted_state = memory_store();
  start(1, 1, /*max_restarts=*/2, {persisted_state.get(), nullptr});
  add("a", 1, 1);
  agents_[0]->start();
  agents_[0]->send(NodeEvent::Kind::kFailed, "one");
  agents_[0]->next();
  agents_[0]->send(NodeEvent::Kind::kStopped);
  EXPECT_EQ(agents_[0]->start().restarts, 1);
  coordinator_.reset();
  const auto dead = std::exchange(store_, memory_store());
  start(1, 1, /*max_restarts=*/2, {persisted_state.get(), nullptr});
  add("b", 1, 1);
  const Assignment successor = agents_[1]->start();
  EXPECT_EQ(successor.generation, 2);
  EXPECT_EQ(successor.restarts, 1);
  agents_[1]->send(NodeEvent::Kind::kDone);
  EXPECT_EQ(agents_[1]->next().first.kind, Kind::kOutcome);
  EXPECT_FALSE(persisted_state->check({JobKeys("run").persisted_state()}, soon()).value())
      << "another job must not inherit it";
  // The first agent's root is gone, so this test writes the outcome that ends the agent's wait.
  ASSERT_TRUE(dead->set(JobKeys("run").event(4), encode(JobEvent{Kind::kOutcome}), soon()));
  agents_[1]->send(NodeEvent::Kind::kBye);
  EXPECT_TRUE(coordinator_->await_all_left(0, soon()));
}

TEST_F(Coordinators, MakeNoDecisionsWithoutTheirLock) {
  struct : TtlLock {
    bool held() const override { return holds; }
    std::atomic<bool> holds = true;
  } claim;
  const auto persisted_state = memory_store();
  start(1, 1, /*max_restarts=*/1, {persisted_state.get(), &claim});
  add("a", 1, 1);
  agents_[0]->start();
  const Bytes written = persisted_state->get(JobKeys("run").persisted_state(), soon()).value();
  claim.holds = false;
  agents_[0]->send(NodeEvent::Kind::kFailed, "one");
  auto failed = failed_.get_future();
  ASSERT_EQ(failed.wait_for(60s), std::future_status::ready);
  EXPECT_THAT(failed.get().message, HasSubstr("claim"));
  coordinator_.reset();
  EXPECT_EQ(persisted_state->get(JobKeys("run").persisted_state(), soon()).value(), written);
  EXPECT_FALSE(store_->check({JobKeys("run").event(2)}, soon()).value()) << "no node is told to stop";
  ASSERT_TRUE(store_->set(JobKeys("run").event(2), encode(JobEvent{Kind::kOutcome}), soon()));  // ends the agent's wait
}

TEST_F(Coordinators, PublishTheNodesForStatus) {
  start(1, 1, 0);
  add("a", 1, 1);
  agents_[0]->start();
  const std::string nodes = to_string(store_->get(JobKeys("run").nodes(), soon()).value());
  EXPECT_THAT(nodes, HasSubstr("\"host\":\"host-a\""));
  EXPECT_THAT(nodes, HasSubstr("\"generation\":0"));
  agents_[0]->send(NodeEvent::Kind::kDone);
  EXPECT_EQ(agents_[0]->next().first.kind, Kind::kOutcome);
  leave_job();
}

TEST_F(Coordinators, IgnoreForeignEvents) {
  start(1, 1, 0);
  ASSERT_TRUE(store_->queue_push(JobKeys("run").inbox(), as_bytes("\xff junk"), soon()));
  add("a", 1, 1);
  agents_[0]->start();
  agents_[0]->send(NodeEvent::Kind::kEnd, "enough");
  EXPECT_EQ(agents_[0]->next().first.outcome.report, "enough");
  leave_job();
}

TEST(RendezvousClient, SendsHeartbeatsWhilePublishing) {
  const auto store = memory_store();
  const auto client = RendezvousClient::start(store->clone().value(), {"run", "n", std::chrono::seconds(1)},
                                              {[](auto&&...) {}, [](auto&&) {}});
  ASSERT_TRUE(client);
  const Deadline deadline = soon();
  const Key inbox = (*client)->keys().inbox();
  // Publishes as an agent does while its workers start.
  while (store->queue_length(inbox, deadline).value() == 0 && !deadline.passed()) {
    (*client)->publish("workers", to_bytes("[]"));
    ASSERT_TRUE((*client)->flush(deadline));
  }
  const auto word = store->queue_pop(inbox, deadline);
  EXPECT_TRUE(word && parse_node_event(*word).value().kind == NodeEvent::Kind::kAlive);
  const JobEvent over{Kind::kRefused, 0, "n"};
  ASSERT_TRUE(store->set((*client)->keys().event(1), encode(over), deadline));
}

}  // namespace
}  // namespace muster
