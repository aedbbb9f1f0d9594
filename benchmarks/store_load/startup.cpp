#include "startup.h"

#include <fmt/format.h>

#include "root_work.h"

namespace muster::load {
namespace {

constexpr size_t kRoleBytes = 53, kRanksBytes = 16;

class Script {
 public:
  Script(const Setting& setting, const Peers& peers) : prefix_(setting.prefix), peers_(peers) {
    const size_t n = peers.workers;
    const Bytes address(peers.exchange == Exchange::kFullMesh ? 154 + 8 * n : 170, 'a');
    counting_ = add(prefix_ + "/init/", 1);
    arriving_ = barrier(prefix_ + "/barrier", static_cast<int64_t>(n));
    for (size_t rank = 0; rank < n; ++rank) {
      waiting_.push_back(wait({address_key(rank)}));
      reading_.push_back(get(address_key(rank), address));
    }
    for (size_t rank = 0; rank < n; ++rank) {
      publishing_.push_back(after(silent_set(address_key(rank), address), waiting_[peers.peer(rank, 0)]));
    }
  }

  // After the greeting: ADD, SET + WAIT, WAIT, GET, then WAIT, WAIT, GET for every other peer, BARRIER.
  const Step* of_worker(size_t rank, size_t position) const {
    if (position == 0) return &counting_;
    if (position == 1) return &publishing_[rank];
    const size_t reads = 3 * peers_.count(rank), read = position - 1;
    if (read < reads)
      return read % 3 == 2 ? &reading_[peers_.peer(rank, read / 3)] : &waiting_[peers_.peer(rank, read / 3)];
    return read == reads ? &arriving_ : nullptr;
  }

  std::vector<Step> of_agent(size_t node) const {
    const size_t nodes = peers_.nodes();
    const Bytes role(kRoleBytes, 'r'), ranks(kRanksBytes, '0');
    const Bytes announcement = silent_set(role_key(node), role);
    const Step own = wait({ranks_key(node)}), read = get(ranks_key(node), ranks);
    if (node > 0) return {after(announcement, own), read};
    std::vector<std::string> all_roles, all_ranks;
    for (size_t i = 0; i < nodes; ++i) {
      all_roles.push_back(role_key(i));
      all_ranks.push_back(ranks_key(i));
    }
    return {after(announcement, wait(all_roles)), multi_get(all_roles, role),
            after(silent_multi_set(all_ranks, ranks), own), read};
  }

  // What the clients send and receive after their greetings, where each speaks to the root itself.
  RootWork by_clients(bool agents) const {
    size_t replies = agents ? 3 * peers_.nodes() + 2 : 0, silent = (agents ? peers_.nodes() + 1 : 0) + peers_.workers;
    for (size_t rank = 0; rank < peers_.workers; ++rank) replies += 1 + 3 * peers_.count(rank) + 1;
    return {.messages_in = static_cast<double>(replies + silent), .messages_out = static_cast<double>(replies)};
  }

 private:
  std::string address_key(size_t rank) const { return fmt::format("{}/default_pg/0//cpu//0/{}", prefix_, rank); }
  std::string role_key(size_t node) const { return fmt::format("{}/torchelastic/role_info/{}", prefix_, node); }
  std::string ranks_key(size_t node) const { return fmt::format("{}/torchelastic/assigned_ranks/{}", prefix_, node); }

  const std::string prefix_;
  const Peers peers_;
  Step counting_, arriving_;
  std::vector<Step> waiting_, reading_, publishing_;  // by rank
};

// Every client follows the steps that `step_of` gives for its number and its position.
template <class StepOf>
Result<> follow(Fleet& fleet, const Deadline& deadline, const StepOf& step_of) {
  std::vector<size_t> position(fleet.size());
  return fleet.run(deadline, [&](size_t client) { return step_of(client, position[client]++); });
}

Result<> follow_agents(const Setting& setting, const Script& script, Fleet& agents) {
  std::vector<std::vector<Step>> steps;
  for (size_t node = 0; node < agents.size(); ++node) steps.push_back(script.of_agent(node));
  return follow(agents, setting.deadline, [&](size_t node, size_t position) {
    return position < steps[node].size() ? &steps[node][position] : nullptr;
  });
}

}  // namespace

Result<Figures> measure_startup(const Setting& setting, const Startup& startup) {
  const Peers& peers = startup.peers;
  const Script script(setting, peers);
  const auto server_of = [&](size_t node) { return startup.servers[node % startup.servers.size()]; };
  MUSTER_ASSIGN(Fleet agents, Fleet::create(true));
  MUSTER_ASSIGN(Fleet workers, Fleet::create(true));
  MUSTER_ASSIGN(RootMeter meter, RootMeter::create(startup.root_url, setting.pid, setting.deadline));
  const TimePoint begin = steady_clock().now();
  if (startup.agents) {
    MUSTER_TRY(agents.connect(server_of, peers.nodes(), setting.deadline));
    MUSTER_TRY(follow_agents(setting, script, agents));
  }
  MUSTER_TRY(workers.connect([&](size_t rank) { return server_of(rank / peers.workers_per_node); }, peers.workers,
                             setting.deadline));
  MUSTER_TRY(follow(workers, setting.deadline,
                    [&](size_t rank, size_t position) { return script.of_worker(rank, position); }));
  const Duration time = steady_clock().now() - begin;
  MUSTER_ASSIGN(RootWork work, meter.work());
  if (!meter.asks()) {
    const double cpu = work.cpu;
    work = script.by_clients(startup.agents);
    work.cpu = cpu;
  }
  return figures_of(work, time);
}

}  // namespace muster::load
