// Simulates backward passes of 2 to 64 workers: random forward passes, parts in any order, messages of the forward pass
// that were lost or that come late, and workers that die.
#include "muster/rpc/backward_pass.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/random.h"

namespace muster::rpc {
namespace {

using Gradients = LocalGraph::Gradients;

Message gradient_message(int64_t value) {
  Message message;
  message.head.resize(sizeof value);
  std::memcpy(message.head.data(), &value, sizeof value);
  return message;
}
int64_t value_of(const Message& message) {
  int64_t value = 0;
  if (!message.head.empty()) std::memcpy(&value, message.head.data(), sizeof value);
  return value;
}

/// One message of the forward pass. Its value is the sum of what it depends on, so gradients are counts of paths.
struct ForwardMessage {
  MessageId id;
  int from = 0, to = 0;
  std::vector<MessageId> depends_on;  ///< messages that its sender had received before
  enum class Fate : uint8_t { kArrives, kLate, kLost } fate = Fate::kArrives;
};

/// The part of a forward pass that one worker knows.
class CountGraph final : public LocalGraph {
 public:
  std::map<MessageId, std::vector<MessageId>> sent;  ///< and what it depends on
  std::vector<MessageId> received, loss;
  int runs_of_finish = 0;

  std::vector<Gradients> run(std::vector<Gradients> arrived) override {
    for (const Gradients& each : arrived) {
      EXPECT_TRUE(sent.contains(each.message));
      EXPECT_TRUE(gradients_.emplace(each.message, value_of(each.gradients)).second) << "a gradient came twice";
    }
    std::vector<Gradients> answers;
    for (const MessageId& message : received) {
      if (answered_.contains(message)) continue;
      int64_t sum = std::ranges::count(loss, message);
      bool complete = true;
      for (const auto& [id, depends_on] : sent) {
        const int64_t times = std::ranges::count(depends_on, message);
        if (times == 0) continue;
        complete = complete && gradients_.contains(id);
        if (complete) sum += times * gradients_.at(id);
      }
      if (!complete) continue;
      answered_.insert(message);
      answers.push_back({message, sum == 0 ? Message{} : gradient_message(sum)});
    }
    return answers;
  }
  void finish() override { ++runs_of_finish; }
  const std::map<MessageId, int64_t>& gradients() const { return gradients_; }

 private:
  std::map<MessageId, int64_t> gradients_;
  std::set<MessageId> answered_;
};

std::string name_of(int worker) { return "w" + std::to_string(worker); }

class PassSimulation {
 public:
  /// `deaths`: whether a worker dies, at any time. Never the one that has begun the pass.
  PassSimulation(int workers, uint64_t seed, bool deaths = false) : random_(seed), workers_(workers) {
    if (deaths) dies_after_ = pick(6 * workers);
    for (int worker = 0; worker < workers; ++worker) index_of_[name_of(worker)] = worker;
    make_forward_pass();
  }

  /// Returns whether the pass has ended well.
  bool run() {
    start(0);
    while (!queue_.empty() || !late_.empty()) {
      if (dies_after_ && (*dies_after_)-- == 0) die(1 + pick(workers_ - 1));
      if (!late_.empty() && (queue_.empty() || pick(4) == 0)) {
        arrive_late();
      } else {
        handle(take_any());
      }
      // Those that wait for an answer that was lost ask again, sometimes more often than they need to.
      for (int worker = 0; worker < workers_; ++worker) {
        if (takes_part(worker) && (queue_.empty() || pick(20 * workers_) == 0)) {
          passes_.at(worker).pass->ask_again();
          advance(worker);
        }
      }
    }
    if (failed_.contains(0)) {
      EXPECT_TRUE(dead_) << "a pass fails only if a worker dies";
      return false;
    }
    check();
    return true;
  }

  int carried() const { return carried_; }

 private:
  struct Event {
    enum class Kind : uint8_t { kPart, kAcknowledgment, kFailure, kAbort };

    int from = 0, to = 0;
    Kind kind = Kind::kPart;
    std::optional<BackwardPass::Part> part;
  };
  struct Worker {
    CountGraph* graph = nullptr;
    std::unique_ptr<LocalGraph> finished;
    std::unique_ptr<BackwardPass> pass;
    std::optional<int> engaged_by;
  };

  int pick(int count) { return static_cast<int>(random_.below(static_cast<uint64_t>(count))); }

  void make_forward_pass() {
    std::map<int, std::vector<MessageId>> received;
    const int count = 1 + pick(6 * workers_);
    for (int i = 0; i < count; ++i) {
      ForwardMessage message;
      message.from = i == 0 ? 0 : pick(workers_);
      message.to = pick(workers_);
      message.id = {message.from, static_cast<uint64_t>(i)};
      const auto& known = received[message.from];
      for (int times = known.empty() ? 0 : pick(4); times > 0; --times) {
        message.depends_on.push_back(known[pick(static_cast<int>(known.size()))]);
      }
      const int fate = pick(20);
      message.fate = fate == 0   ? ForwardMessage::Fate::kLost
                     : fate == 1 ? ForwardMessage::Fate::kLate
                                 : ForwardMessage::Fate::kArrives;
      if (message.fate == ForwardMessage::Fate::kArrives) received[message.to].push_back(message.id);
      if (message.fate == ForwardMessage::Fate::kLate) late_.push_back(message);
      forward_.push_back(message);
    }
    for (int times = received[0].empty() ? 0 : 1 + pick(4); times > 0; --times) {
      loss_.push_back(received[0][pick(static_cast<int>(received[0].size()))]);
    }
  }

  void start(int worker) {
    auto graph = std::make_unique<CountGraph>();
    BackwardPass::Peers sent, received;
    for (const ForwardMessage& message : forward_) {
      if (message.from == worker) {
        sent[message.id] = name_of(message.to);
        graph->sent[message.id] = message.depends_on;
      }
      if (message.to == worker && message.fate == ForwardMessage::Fate::kArrives) {
        received[message.id] = name_of(message.from);
        graph->received.push_back(message.id);
      }
    }
    if (worker == 0) graph->loss = loss_;
    Worker& state = passes_[worker];
    state.graph = graph.get();
    state.pass = std::make_unique<BackwardPass>(std::move(graph), std::move(sent), std::move(received));
    if (worker == 0) advance(0);
  }

  bool takes_part(int worker) const { return passes_.contains(worker) && !failed_.contains(worker) && dead_ != worker; }

  /// Callers of a dead worker notice, and so do workers that it has called.
  void die(int worker) {
    dead_ = worker;
    std::erase_if(queue_, [&](const Event& event) { return event.to == worker && event.kind != Event::Kind::kPart; });
    for (const auto& [caller, callees] : unacknowledged_) {
      if (callees.contains(worker)) queue_.push_back({worker, caller, Event::Kind::kFailure, {}});
    }
    for (auto& [index, each] : passes_) {
      if (each.engaged_by == worker) queue_.push_back({worker, index, Event::Kind::kAbort, {}});
    }
  }

  /// As PassRunner::fail().
  void fail(int worker) {
    if (!takes_part(worker) || passes_.at(worker).pass->is_ended() || !failed_.insert(worker).second) return;
    Worker& state = passes_.at(worker);
    if (const auto engaged_by = std::exchange(state.engaged_by, std::nullopt)) {
      queue_.push_back({worker, *engaged_by, Event::Kind::kFailure, {}});
    }
    for (const std::string& peer : state.pass->peers()) {
      queue_.push_back({worker, index_of_.at(peer), Event::Kind::kAbort, {}});
    }
  }

  void arrive_late() {
    const ForwardMessage message = late_.front();
    late_.pop_front();
    if (message.to == dead_ || failed_.contains(message.to)) return;
    if (!passes_.contains(message.to)) return start_with(message);
    passes_.at(message.to).pass->add_late(message.id, name_of(message.from));
    advance(message.to);
  }
  /// It arrives before the pass does, so it takes part.
  void start_with(const ForwardMessage& message) {
    for (ForwardMessage& each : forward_) {
      if (each.id == message.id) each.fate = ForwardMessage::Fate::kArrives;
    }
  }

  Event take_any() {
    const auto place = queue_.begin() + pick(static_cast<int>(queue_.size()));
    Event event = std::move(*place);
    queue_.erase(place);
    return event;
  }

  void handle(Event event) {
    if (event.to == dead_) {
      if (event.kind == Event::Kind::kPart) queue_.push_back({event.to, event.from, Event::Kind::kFailure, {}});
      return;
    }
    if (event.kind != Event::Kind::kPart) {
      if (event.kind != Event::Kind::kAbort && !end_call(event.to, event.from)) return;
      if (event.kind != Event::Kind::kAcknowledgment) return fail(event.to);
      BackwardPass& pass = *passes_.at(event.to).pass;
      if (event.part) pass.receive(name_of(event.from), std::move(event.part->answer), event.part->expected);
      pass.acknowledge();
      return failed_.contains(event.to) ? void() : advance(event.to);
    }
    if (failed_.contains(event.to)) return queue_.push_back({event.to, event.from, Event::Kind::kFailure, {}});
    if (!passes_.contains(event.to)) start(event.to);
    Worker& worker = passes_.at(event.to);
    worker.pass->receive(name_of(event.from), std::move(event.part->answer), event.part->expected);
    if (!worker.engaged_by && event.to != 0) {
      worker.engaged_by = event.from;
    } else {
      queue_.push_back({event.to, event.from, Event::Kind::kAcknowledgment, {}});
    }
    advance(event.to);
  }
  /// Ends one of the calls with which `caller` has sent parts. False if there is none: its failure came first.
  bool end_call(int caller, int callee) {
    auto& callees = unacknowledged_[caller];
    const auto call = callees.find(callee);
    if (call == callees.end()) return false;
    callees.erase(call);
    return true;
  }

  void advance(int index) {
    Worker& worker = passes_.at(index);
    while (auto arrived = worker.pass->begin_run()) {
      EXPECT_FALSE(worker.pass->begin_run());
      worker.pass->end_run(worker.pass->graph().run(std::move(*arrived)));
    }
    const auto only_owes_reply = [&] {
      return worker.engaged_by && worker.pass->only_owes(name_of(*worker.engaged_by));
    };
    while (!only_owes_reply()) {
      auto part = worker.pass->next_part();
      if (!part) break;
      const int to = index_of_.at(part->to);
      send(index, to, Event::Kind::kPart, std::move(part));
      unacknowledged_[index].insert(to);
    }
    if (worker.pass->is_answered() && !worker.finished) {
      worker.finished = worker.pass->take_graph();
      worker.finished->finish();
    }
    std::optional<BackwardPass::Part> last;
    if (only_owes_reply()) last = worker.pass->take_last_part();
    if (!worker.pass->is_ended()) return;
    if (index == 0 && !queue_has_parts()) ended_ = true;
    if (worker.engaged_by) {
      carried_ += last ? 1 : 0;
      send(index, *std::exchange(worker.engaged_by, std::nullopt), Event::Kind::kAcknowledgment, std::move(last));
    }
  }
  void send(int from, int to, Event::Kind kind, std::optional<BackwardPass::Part> part) {
    const bool is_new = !part || !part->answer || answered_.insert(part->answer->message).second;
    EXPECT_TRUE(is_new) << "a message was answered twice";
    queue_.push_back({from, to, kind, std::move(part)});
  }
  bool queue_has_parts() const {
    return std::ranges::any_of(queue_, [](const Event& event) { return event.part.has_value(); });
  }

  /// The gradient of each message, by the chain rule over the whole forward pass.
  std::map<MessageId, int64_t> expected_gradients() const {
    std::map<MessageId, int64_t> gradients;
    for (const MessageId& message : loss_) ++gradients[message];
    for (auto message = forward_.rbegin(); message != forward_.rend(); ++message) {
      if (message->fate != ForwardMessage::Fate::kArrives) continue;
      for (const MessageId& input : message->depends_on) gradients[input] += gradients[message->id];
    }
    return gradients;
  }

  void check() {
    EXPECT_TRUE(ended_) << "the pass has not ended at the worker that has begun it";
    auto expected = expected_gradients();
    for (auto& [index, worker] : passes_) {
      if (index == dead_) continue;
      EXPECT_FALSE(failed_.contains(index)) << "the pass has failed at " << name_of(index) << " alone";
      EXPECT_TRUE(worker.pass->is_ended()) << name_of(index) << " waits for " << worker.pass->missing();
      EXPECT_FALSE(worker.engaged_by);
      ASSERT_NE(worker.finished, nullptr);
      EXPECT_EQ(worker.graph->runs_of_finish, 1);
      for (const auto& [message, gradient] : worker.graph->gradients()) {
        EXPECT_EQ(gradient, expected[message]) << message.sender << "." << message.number;
      }
      EXPECT_EQ(worker.graph->gradients().size(), worker.graph->sent.size());
    }
    for (const auto& [message, gradient] : expected) {
      EXPECT_TRUE(gradient == 0 || passes_.contains(message.sender)) << "a worker with gradients took no part";
    }
  }

  Random random_;
  const int workers_;
  std::map<std::string, int> index_of_;
  std::vector<ForwardMessage> forward_;  ///< in the order of sending
  std::vector<MessageId> loss_;
  std::deque<ForwardMessage> late_;
  std::map<int, Worker> passes_;
  std::vector<Event> queue_;
  std::set<MessageId> answered_;
  std::map<int, std::multiset<int>> unacknowledged_;  ///< by caller, whom it has called
  std::optional<int> dies_after_, dead_;
  std::set<int> failed_;
  bool ended_ = false;
  int carried_ = 0;  ///< parts that acknowledgments have carried
};

TEST(BackwardPass, EveryMessageGetsItsGradientOnceAndEveryWorkerEnds) {
  int carried = 0;
  for (const int workers : {2, 3, 5, 8, 16, 64}) {
    for (uint64_t seed = 0; seed < (workers > 16 ? 30 : 300); ++seed) {
      SCOPED_TRACE("workers " + std::to_string(workers) + ", seed " + std::to_string(seed));
      PassSimulation simulation(workers, seed);
      simulation.run();
      carried += simulation.carried();
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(carried, 100);
}

TEST(BackwardPass, EndsWhereItHasBegunIfAWorkerDies) {
  int well = 0, failed = 0;
  for (const int workers : {2, 3, 5, 8, 16, 64}) {
    for (uint64_t seed = 0; seed < (workers > 16 ? 30 : 300); ++seed) {
      SCOPED_TRACE("workers " + std::to_string(workers) + ", seed " + std::to_string(seed));
      ++(PassSimulation(workers, seed, true).run() ? well : failed);
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(well, 100);
  EXPECT_GT(failed, 100);
}

TEST(BackwardPass, NamesTheWorkersThatOweAnswers) {
  auto graph = std::make_unique<CountGraph>();
  graph->sent[{0, 1}] = {};
  graph->sent[{0, 2}] = {};
  BackwardPass pass(std::move(graph), {{{0, 1}, "ps"}, {{0, 2}, "ps"}}, {});
  pass.end_run(pass.graph().run(pass.begin_run().value()));
  EXPECT_EQ(pass.missing(), "worker \"ps\" (2 answers)");
  const auto part = pass.next_part();
  ASSERT_TRUE(part);
  EXPECT_EQ(part->to, "ps");
  EXPECT_EQ(part->expected.size(), 2);
  EXPECT_FALSE(pass.is_ended());
}

}  // namespace
}  // namespace muster::rpc
