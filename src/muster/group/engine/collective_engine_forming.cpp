// The part of CollectiveEngine that runs once, when the group forms.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "muster/base/log.h"
#include "muster/collective/schedule/schedule_builder.h"
#include "muster/group/engine/collective_engine.h"

namespace muster {
namespace {

/// Schedule of an all_reduce of `bytes` that goes up the tree of links and down again.
Schedule vote_along_tree(const GroupSpec& spec, size_t bytes) {
  const auto [rank, size, name, generation] = spec;
  ScheduleBuilder builder;
  const Range vote = output(0, bytes);
  const Rank first = rank * kTreeWidth + 1, end = std::min(size, first + kTreeWidth);
  uint32_t known = Step::kNone;
  for (Rank child = first; child < end; ++child) {
    known = builder.receive_reduce(child, builder.scratch(bytes), vote, vote, {known});
  }
  if (rank > 0) {
    known = builder.send(tree_parent(rank), vote, {known});
    known = builder.receive(tree_parent(rank), vote, {known});
  }
  for (Rank child = first; child < end; ++child) builder.send(child, vote, {known});
  return builder.take();
}

}  // namespace

Result<std::unique_ptr<CollectiveEngine>> CollectiveEngine::create(Mesh mesh, const GroupSpec& spec,
                                                                   std::shared_ptr<Arena> arena,
                                                                   const Deadline& deadline) {
  std::unique_ptr<CollectiveEngine> engine(new CollectiveEngine(std::move(mesh), spec));
  CollectiveEngine& self = *engine;
  const Topology& topology = self.mesh_.topology;
  if (topology.hosts.size() == static_cast<size_t>(spec.size)) return engine;  // no host has two ranks
  auto joined = self.join_host_comm(std::move(arena));
  if (!joined && joined.error().code != ErrorCode::kResourceExhausted) {
    Error why = joined.error().in(fmt::format("forming group \"{}\" at rank {}", spec.name, spec.rank));
    why.rank = spec.rank;
    self.shut_down(why);  // ranks that have formed the group get this error in their first call
    return tl::unexpected(why);
  }
  MUSTER_ASSIGN(const bool all, self.all_agree(joined.has_value(), deadline));
  if (!all) {
    self.drop_host_comm(joined ? "another rank cannot allocate shared memory" : joined.error().message);
  } else if (topology.layered()) {
    self.hierarchy_.emplace(topology, spec.rank, self.levels());
  }
  if (self.mesh_.host_comm_memory) {
    for (const RankInfo& member : self.mesh_.members) self.mesh_.link_table->monitor_process(member.rank);
  }
  return engine;
}

/// Returns success without a host communicator if this host has one rank.
Result<> CollectiveEngine::join_host_comm(std::shared_ptr<Arena> arena) {
  if (mesh_.no_host_comm_memory) return tl::unexpected(*mesh_.no_host_comm_memory);
  if (!mesh_.host_comm_memory) return {};
  const int host_rank = mesh_.topology.host_local_rank[spec_.rank];
  MUSTER_ASSIGN(comm_, HostComm::attach(mesh_.host_comm_memory, host_rank, static_cast<int>(host_ranks().size()),
                                        [this](Rank awaited) { return watch(host_ranks()[awaited]); }));
  arena_ = arena ? std::move(arena) : Arena::create();
  comm_->use(arena_);
  return {};
}

/// Logs the warning once per process, not once per group.
void CollectiveEngine::drop_host_comm(const std::string& why) {
  comm_.reset();
  arena_.reset();
  mesh_.host_comm_memory.reset();
  static std::atomic_flag warned;
  if (warned.test_and_set()) return;
  log(LogLevel::kWarning,
      fmt::format("group \"{}\" does not use shared memory, over slower links: {}", spec_.name, why));
}

/// True if all ranks vote yes. The vote decides about shared memory, so it uses links, and only the tree of links that
/// a group of any size has.
Result<bool> CollectiveEngine::all_agree(bool yes, const Deadline& deadline) {
  int32_t vote = yes ? 1 : 0;
  const BufferView tensor(&vote, 1, Dtype::kInt32);
  const Operation operation{{Collective::kAllReduce, Dtype::kInt32, ReduceOp::kMin, 0, 1}, tensor, tensor};
  pipeline_.runner().follow(vote_along_tree(spec_, sizeof(vote)));
  pipeline_.runner().begin(operation, links_);
  auto result = finish_schedule(deadline);
  if (result) return vote == 1;
  shut_down(result.error());
  return tl::unexpected(result.error());
}

/// Uses only facts that all ranks know about each other, so that all ranks choose the same algorithms.
SchedulePipeline CollectiveEngine::pipeline_for(const Mesh& mesh) {
  std::map<std::string, int> hosts;
  bool local = true;
  for (const RankInfo& member : mesh.members) {
    ++hosts[member.domain];
    local = local && !member.local_address.empty();
  }
  int max_ranks = 1;
  for (const auto& [domain, ranks] : hosts) max_ranks = std::max(max_ranks, ranks);
  const char* kind = hosts.size() > 1 || !local ? "tcp" : mesh.members[0].shares_memory ? "shm" : "unix";
  return {mesh.tuning, kind, max_ranks};
}

Hierarchy::Levels CollectiveEngine::levels() {
  return {
      [this](const Operation& operation, const Deadline& deadline) { return run_on_host_comm(operation, deadline); },
      [this, ranks = std::vector<Rank>()](const Operation& operation, int shard, const Deadline& deadline) mutable {
        const Topology& topology = mesh_.topology;
        ranks.clear();
        for (int host = 0; host < static_cast<int>(topology.hosts.size()); ++host) {
          ranks.push_back(topology.hosts[host][topology.shard_rank(host, shard)]);
        }
        return begin_schedule(operation, ranks, topology.host_of[spec_.rank], deadline);
      },
      [this](const Deadline& deadline) { return finish_schedule(deadline); }};
}

}  // namespace muster
