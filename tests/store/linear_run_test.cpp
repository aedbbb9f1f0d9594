// Concurrent clients use real servers. Their histories must be linearizable. The test takes seconds by default. To
// search for longer, or to repeat a run: MUSTER_ROUNDS=1000 MUSTER_SEED=7 store_linear_run_test.
#include "store/linear_run.h"

#include "store/expect.h"
#include "store/fault_relay.h"
#include "store/test_server.h"

namespace muster {
namespace {

// A root and a chain of proxies. servers.back() is the root. Every other server is a proxy of the next one.
struct ProxyChain {
  explicit ProxyChain(int proxies, RelayFaults faults = {}, uint64_t seed = 0) {
    StoreServerOptions options;
    options.threads = 4;
    options.few_clients = 1;
    options.tiered = true;
    servers.push_back(std::make_unique<TestServer>("", options));
    for (int i = 0; i < proxies; ++i) {
      relays.push_back(std::make_unique<FaultRelay>(servers.front()->server->muster_addresses()[0], faults, seed + i));
      servers.insert(servers.begin(), std::make_unique<TestServer>(relays.back()->url(), options));
    }
  }
  ~ProxyChain() {
    while (!servers.empty()) servers.erase(servers.begin());  // a proxy ends before its upstream server
  }
  std::vector<std::unique_ptr<FaultRelay>> relays;
  std::vector<std::unique_ptr<TestServer>> servers;
};

// Clients of all kinds, spread over the servers of a tower.
LinearRun run_on(const ProxyChain& tower, uint64_t seed, bool certain) {
  LinearRun run;
  run.seed = seed;
  run.open = [&tower, certain](int client) -> std::unique_ptr<RecordedClient> {
    const TestServer& server = *tower.servers[static_cast<size_t>(client) % tower.servers.size()];
    if (client % 3 == 0) return recorded_torch(server.torch_address());
    auto store = open_store(client % 3 == 1 ? server.tcp_url() : server.unix_url(), test_secret(), test_deadline());
    return store ? recorded(std::move(*store), certain) : nullptr;
  };
  run.die = [&tower](const Request& request) { send_and_die(tower.servers[0]->tcp_url(), test_secret(), request); };
  return run;
}

void expect_linearizable(const LinearRun& run) {
  const History history = run_clients(run);
  EXPECT_GT(history.size(), static_cast<size_t>(run.clients)) << "the clients got nothing done";
  const auto verdict = check_history(history);
  if (!verdict) ADD_FAILURE() << "seed " << run.seed << ": " << verdict.error().to_string();
}

class LinearStores : public testing::TestWithParam<int> {};

TEST_P(LinearStores, KeepsHistoriesLinearizable) {
  const uint64_t seed = seed_or(1);
  for (int round = 0; round < rounds_or(2); ++round) {
    const ProxyChain tower(GetParam());
    LinearRun run = run_on(tower, seed + round, true);
    run.wide = run.seed % 2 == 0;
    expect_linearizable(run);
  }
}

INSTANTIATE_TEST_SUITE_P(Proxies, LinearStores, testing::Values(0, 1, 2));

TEST(LinearFaults, BrokenProxyLinksKeepHistoriesLinearizable) {
  const uint64_t seed = seed_or(1);
  uint64_t cuts = 0;
  for (int round = 0; round < rounds_or(2); ++round) {
    const ProxyChain tower(2, {.cut = 0.02, .split = 0.1, .delay = 0.1}, seed + round);
    // The clients' own connections do not break, so the clients lose no reply.
    expect_linearizable(run_on(tower, seed + round, true));
    for (const auto& relay : tower.relays) cuts += relay->cuts();
  }
  EXPECT_GT(cuts, 0U) << "nothing was tested";
}

TEST(LinearFaults, BrokenConnectionsKeepHistoriesLinearizable) {
  const ProxyChain tower(1);
  const uint64_t seed = seed_or(1);
  uint64_t cuts = 0;
  for (int round = 0; round < rounds_or(2); ++round) {
    const RelayFaults faults{.cut = 0.004, .split = 0.1, .delay = 0.1};
    LinearRun run = run_on(tower, seed + round, false);
    FaultRelay to_proxy(tower.servers[0]->server->muster_addresses()[0], faults, run.seed);
    FaultRelay to_root(tower.servers[1]->server->muster_addresses()[0], faults, run.seed + 1);
    FaultRelay to_torch(tower.servers[0]->torch_address(), faults, run.seed + 2);
    run.open = [&](int client) -> std::unique_ptr<RecordedClient> {
      if (client % 3 == 0) return recorded_torch(to_torch.address());
      auto store = open_store((client % 3 == 1 ? to_proxy : to_root).url(), test_secret(), test_deadline());
      return store ? recorded(std::move(*store), false) : nullptr;
    };
    expect_linearizable(run);
    cuts += to_proxy.cuts() + to_root.cuts() + to_torch.cuts();
  }
  EXPECT_GT(cuts, 0U) << "nothing was tested";
}

}  // namespace
}  // namespace muster
