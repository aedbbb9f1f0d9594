// The histories of clients of simulated proxies must be linearizable. The simulation finds errors in seconds that real
// servers show rarely. MUSTER_ROUNDS=100000 MUSTER_SEED=1 searches for errors. MUSTER_ROUNDS=1 MUSTER_SEED=n repeats
// one run.
#include <gtest/gtest.h>

#include <algorithm>

#include "sim/tier_sim.h"
#include "store/linear_check.h"
#include "store/linear_run.h"
#include "store/random_requests.h"

namespace muster {
namespace {

constexpr int kClients = 9;
constexpr int kCalls = 60;

// Clients on every node. Each client has one call at a time. It cancels a wait after a timeout. Some clients die during
// a call, and new clients replace them.
class SimulatedClients {
 public:
  SimulatedClients(TierSim::Options options, uint64_t seed)
      : nodes_(options.nodes),
        tiers_(std::move(options), seed, [this](int, Reply reply) { on_reply(std::move(reply)); }) {
    for (int i = 0; i < kClients; ++i) {
      clients_.push_back(
          {RandomRequests(seed, i, true, /*wide=*/seed % 2 == 0), {}, static_cast<ClientId>(i), i % nodes_});
      tiers_.time().after(Duration(tiers_.random().below(2'000'000)), [this, i] { next(i); });
    }
  }

  TierSim& tiers() { return tiers_; }

  /// Crashes the node and restarts it later. The unanswered calls of its clients may have taken effect. New clients on
  /// other nodes replace these clients.
  void crash(int node) {
    if (tiers_.crashed(node)) return;
    tiers_.crash(node, /*reported=*/tiers_.random().chance(0.5));
    for (int i = 0; i < kClients; ++i) {
      if (clients_[static_cast<size_t>(i)].node == node) leave(i);
    }
    tiers_.time().after(Duration(tiers_.random().below(8'000'000'000)), [this, node] { tiers_.restart(node); });
  }

  Result<> run() {
    while (finished_ < kClients) {
      if (tiers_.time().now() > TimePoint{} + std::chrono::minutes(30))
        return fail(ErrorCode::kTimeout, "a client hangs");
      tiers_.time().step();
    }
    if (!broken_.empty()) return fail(ErrorCode::kMismatch, broken_);
    return check_history(history_);
  }

 private:
  struct ClientState {
    RandomRequests requests;
    Call call;
    ClientId client;
    int node;
    int calls = 0;
    bool asks = false;
  };

  void next(int index) {
    ClientState& state = clients_[static_cast<size_t>(index)];
    if (state.calls++ == kCalls) {
      ++finished_;
      return;
    }
    state.call = {index, state.requests.next(), tiers_.time().now()};
    Request& request = state.call.request;
    request.id = static_cast<RequestId>(state.calls);
    state.asks = true;
    tiers_.submit(state.node, state.client, request);
    if (state.asks && tiers_.random().chance(0.02)) return die(index);
    if (!may_wait(request)) return;
    const int call = state.calls;
    tiers_.time().after(state.requests.wait_timeout(), [this, index, call] {
      ClientState& timed_out = clients_[static_cast<size_t>(index)];
      if (timed_out.calls != call || !timed_out.asks) return;
      tiers_.submit(timed_out.node, timed_out.client, {StoreOperation::kCancel, timed_out.call.request.id});
    });
  }

  void die(int index) {
    const ClientState& state = clients_[static_cast<size_t>(index)];
    tiers_.drop(state.node, state.client);
    leave(index);
  }

  // Replaces the client with a new client on a live node.
  void leave(int index) {
    ClientState& state = clients_[static_cast<size_t>(index)];
    state.client += kClients;
    while (tiers_.crashed(state.node))
      state.node = static_cast<int>(tiers_.random().below(static_cast<uint64_t>(nodes_)));
    if (!state.asks) return;
    history_.push_back(state.call);
    pause(index);
  }

  void on_reply(Reply reply) {
    const auto index = static_cast<int>(reply.client % kClients);
    ClientState& state = clients_[static_cast<size_t>(index)];
    if (state.client != reply.client) return;  // the reply is for a dead client
    if (!state.asks || reply.id != state.call.request.id) {
      broken_ = "a client got an unexpected reply, or got one twice";
      return;
    }
    const auto failed = [&](ErrorCode code) { return !reply.status && reply.status.error().code == code; };
    if (failed(ErrorCode::kPeerLost)) {  // the proxy has lost the root, so the node ends
      tiers_.time().after(Duration{0}, [this, node = state.node] { crash(node); });
      return;
    }
    state.call.returned = tiers_.time().now();
    const bool cancelled = failed(ErrorCode::kAborted);
    state.call.reply = std::move(reply);
    if (!cancelled) history_.push_back(state.call);
    pause(index);
  }

  void pause(int index) {
    clients_[static_cast<size_t>(index)].asks = false;
    tiers_.time().after(Duration(tiers_.random().below(1'000'000)), [this, index] { next(index); });
  }

  const int nodes_;
  TierSim tiers_;
  std::vector<ClientState> clients_;
  History history_;
  int finished_ = 0;
  std::string broken_;
};

struct Scenario {
  const char* name;
  int nodes, fanout;
  bool merge;
  double cut;
  int partitions;
  int crashes = 0;
};

class LinearTiers : public testing::TestWithParam<Scenario> {};

TEST_P(LinearTiers, KeepHistoriesLinearizable) {
  const Scenario& scenario = GetParam();
  TierSim::Options options;
  options.nodes = scenario.nodes;
  options.fanout = scenario.fanout;
  options.proxy.merge = scenario.merge;
  options.cut = scenario.cut;
  for (int round = 0; round < rounds_or(40); ++round) {
    const uint64_t seed = seed_or(1) + static_cast<uint64_t>(round);
    SimulatedClients clients(options, seed);
    Random random(seed);
    for (int i = 0; i < scenario.partitions; ++i) {
      const int node = 1 + static_cast<int>(random.below(static_cast<uint64_t>(scenario.nodes - 1)));
      const Duration how_long(random.below(12'000'000'000));
      clients.tiers().time().after(Duration(random.below(300'000'000)),
                                   [&clients, node, how_long] { clients.tiers().partition(node, how_long); });
    }
    for (int i = 0; i < scenario.crashes; ++i) {
      const int node = 1 + static_cast<int>(random.below(static_cast<uint64_t>(scenario.nodes - 1)));
      clients.tiers().time().after(Duration(random.below(300'000'000)), [&clients, node] { clients.crash(node); });
    }
    const auto verdict = clients.run();
    ASSERT_TRUE(verdict.has_value()) << scenario.name << ", seed " << seed << ": " << verdict.error().to_string();
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, LinearTiers,
    testing::Values(Scenario{"root alone", 1, 0, false, 0, 0}, Scenario{"plain proxies", 3, 0, false, 0, 0},
                    Scenario{"merging", 4, 0, true, 0, 0}, Scenario{"three tiers", 7, 2, true, 0, 0},
                    Scenario{"cuts", 4, 0, true, 0.02, 0}, Scenario{"cuts in three tiers", 7, 2, true, 0.02, 0},
                    Scenario{"partitions", 7, 2, true, 0.01, 3}, Scenario{"crashes", 4, 0, true, 0, 0, 3},
                    Scenario{"crashes in three tiers", 7, 2, true, 0, 0, 3},
                    Scenario{"everything", 7, 2, true, 0.01, 2, 3}),
    [](const auto& info) {
      std::string name = info.param.name;
      std::replace(name.begin(), name.end(), ' ', '_');
      return name;
    });

}  // namespace
}  // namespace muster
