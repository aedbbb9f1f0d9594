#include "muster/group/form/topology.h"

#include <algorithm>
#include <map>
#include <string>

namespace muster {

Topology::Topology(const std::vector<RankInfo>& members) : host_of(members.size()), host_local_rank(members.size()) {
  std::map<std::string, int> known;
  for (const RankInfo& member : members) {
    const int next = static_cast<int>(hosts.size());
    const int host = member.shares_memory ? known.try_emplace(member.domain, next).first->second : next;
    if (host == next) hosts.emplace_back();
    host_of[member.rank] = host;
    host_local_rank[member.rank] = host_local_size(host);
    hosts[host].push_back(member.rank);
    shards = std::max(shards, host_local_size(host));
  }
}

Rank Topology::owner(int host, int shard) const {
  const int local = shard_rank(host, shard);
  return first_shard(host, local) == shard ? hosts[host][local] : kNoRank;
}

}  // namespace muster
