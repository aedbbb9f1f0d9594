// What happens once, when a group forms.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>

#include "muster/base/log.h"
#include "muster/collective/schedule/schedule_builder.h"
#include "muster/group/engine/collective_engine.h"

namespace muster {
namespace {

/// What a rank does in an all_reduce of `bytes` up the tree of links and down again.
Schedule vote_along_tree(const GroupSpec& membership, size_t bytes) {
  const auto [rank, size, name, generation] = membership;
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

Result<std::unique_ptr<CollectiveEngine>> CollectiveEngine::create(Mesh mesh, const GroupSpec& membership,
                                                                   std::shared_ptr<Arena> arena,
                                                                   const Deadline& deadline) {
  std::unique_ptr<CollectiveEngine> engine(new CollectiveEngine(std::move(mesh), membership));
  CollectiveEngine& self = *engine;
  const Topology& topology = self.mesh_.topology;
  if (topology.hosts.size() == static_cast<size_t>(membership.size)) return engine;  // no host has two ranks
  auto joined = self.join_host_comm(std::move(arena));
  if (!joined && joined.error().code != ErrorCode::kResourceExhausted) {
    Error why = joined.error().in(fmt::format("forming group \"{}\" at rank {}", membership.name, membership.rank));
    why.rank = membership.rank;
    self.die(why);  // those who have formed hear it in their first call
    return tl::unexpected(why);
  }
  MUSTER_ASSIGN(const bool all, self.all_agree(joined.has_value(), deadline));
  if (!all) {
    self.do_without_host_comm(joined ? "another rank has no memory for it" : joined.error().message);
  } else if (topology.layered()) {
    self.hierarchy_.emplace(topology, membership.rank, self.levels());
  }
  if (self.mesh_.host_comm_memory) self.watch_processes();
  return engine;
}

/// Nothing to do where this host has one rank.
Result<> CollectiveEngine::join_host_comm(std::shared_ptr<Arena> arena) {
  if (mesh_.no_host_comm_memory) return tl::unexpected(*mesh_.no_host_comm_memory);
  if (!mesh_.host_comm_memory) return {};
  const int place = mesh_.topology.host_local_rank[membership_.rank];
  MUSTER_ASSIGN(comm_, HostComm::attach(mesh_.host_comm_memory, place, static_cast<int>(host_ranks().size()),
                                        [this](Rank awaited) { return watch(host_ranks()[awaited]); }));
  arena_ = arena ? std::move(arena) : Arena::create();
  comm_->use(arena_);
  return {};
}

/// Says so once a process, however many of its groups have to.
void CollectiveEngine::do_without_host_comm(const std::string& why) {
  comm_.reset();
  arena_.reset();
  mesh_.host_comm_memory.reset();
  static std::atomic_flag said;
  if (said.test_and_set()) return;
  log(LogLevel::kWarning,
      fmt::format("group \"{}\" goes without shared memory, over slower links: {}", membership_.name, why));
}

/// Whether all ranks say yes: over links, as it is about the memory, and over those that every group has.
Result<bool> CollectiveEngine::all_agree(bool mine, const Deadline& deadline) {
  int32_t yes = mine ? 1 : 0;
  Operation vote;
  vote.call = Call{Collective::kAllReduce, Dtype::kInt32, ReduceOp::kMin, 0, 1};
  vote.input = vote.output = {&yes, 1, Dtype::kInt32};
  schedule_runner_.follow(vote_along_tree(membership_, sizeof(yes)));
  route_ = links_;
  schedule_runner_.begin(vote, route_);
  auto result = end_passage(deadline);
  if (result) return yes == 1;
  die(result.error());
  return tl::unexpected(result.error());
}

/// From what all ranks know of each other, so that they choose alike.
void CollectiveEngine::tune() {
  std::map<std::string, int> hosts;
  bool local = true;
  for (const RankInfo& member : mesh_.members) {
    ++hosts[member.domain];
    local = local && !member.local_address.empty();
  }
  int most = 1;
  for (const auto& [domain, ranks] : hosts) most = std::max(most, ranks);
  const char* kind = hosts.size() > 1 || !local ? "tcp" : mesh_.members[0].shares_memory ? "shm" : "unix";
  schedule_runner_.choose_by(mesh_.tuning, kind, most);
}

}  // namespace muster
