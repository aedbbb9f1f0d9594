#pragma once

#include <vector>

#include "muster/collective/rank_info.h"

namespace muster {

/// A group up to this size links all pairs of ranks when it forms.
inline constexpr int kMaxFullMesh = 16;
/// A larger group links a tree when it forms, so that reports of failures reach all ranks, and makes the other links
/// when a schedule needs them. A rank of the tree has this many children.
inline constexpr int kTreeWidth = 4;
inline Rank tree_parent(Rank rank) { return (rank - 1) / kTreeWidth; }

/// Which ranks share a host's memory, and which rank sends which shard between hosts. The same at every rank.
///
/// Data that crosses hosts is cut into shards, as many as the largest host has ranks. Each host spreads the shards over
/// its ranks in order: one for each rank if the hosts are equal, several for some ranks of a smaller host.
struct Topology {
  Topology() = default;
  explicit Topology(const std::vector<RankInfo>& members);

  std::vector<std::vector<Rank>> hosts;       ///< the ranks of each host, ascending; hosts by their first rank
  std::vector<int> host_of, host_local_rank;  ///< by rank: its host, and its index in hosts[host]
  int shards = 1;

  /// True if there are several hosts and at least one has several ranks. Then two levels of communication are faster.
  bool layered() const { return hosts.size() > 1 && hosts.size() < host_of.size(); }
  /// The ranks of this rank's host.
  const std::vector<Rank>& host_ranks(Rank rank) const { return hosts[host_of[rank]]; }
  int host_local_size(int host) const { return static_cast<int>(hosts[host].size()); }
  /// The first shard of the rank with index `local` on `host`. Returns `shards` for local == host_local_size(host).
  int first_shard(int host, int local) const { return local * shards / host_local_size(host); }
  /// The index, on the host, of the rank that sends and receives the shard.
  int shard_rank(int host, int shard) const { return ((shard + 1) * host_local_size(host) - 1) / shards; }
  /// The rank of `host` whose first shard is `shard`, else kNoRank. That rank's own block travels in this shard.
  Rank owner(int host, int shard) const;
};

}  // namespace muster
