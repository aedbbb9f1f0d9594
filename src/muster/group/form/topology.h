#pragma once

#include <vector>

#include "muster/collective/rank_info.h"

namespace muster {

/// Which ranks share a host's memory, and who carries what between hosts. The same at every rank.
///
/// What crosses hosts is cut into slots, as many as the largest host has ranks, and each host spreads them over its
/// ranks in order: with equal hosts each rank carries one, with fewer ranks some carry several.
struct Topology {
  Topology() = default;
  explicit Topology(const std::vector<RankInfo>& members);

  std::vector<std::vector<Rank>> hosts;       ///< the ranks of each, ascending; hosts by their first rank
  std::vector<int> host_of, host_local_rank;  ///< by rank: its host, and its place there
  int shards = 1;

  /// Several hosts, one of them with several ranks: worth two levels.
  bool layered() const { return hosts.size() > 1 && hosts.size() < host_of.size(); }
  int host_local_size(int host) const { return static_cast<int>(hosts[host].size()); }
  /// The first slot that the host's rank at place `local` carries; that of place locals(host) is `slots`.
  int first_shard(int host, int local) const { return local * shards / host_local_size(host); }
  /// The place, on the host, of who carries the slot.
  int shard_rank(int host, int shard) const { return ((shard + 1) * host_local_size(host) - 1) / shards; }
  /// The rank of that host that has the slot for its first, if there is one: whose own block travels in it.
  Rank owner(int host, int shard) const;
};

}  // namespace muster
