#include "muster/group/form/topology.h"

#include <algorithm>
#include <map>
#include <string>

namespace muster {

Topology::Topology(const std::vector<Member>& members) : host_of(members.size()), local_of(members.size()) {
  std::map<std::string, int> known;
  for (const Member& member : members) {
    const int next = static_cast<int>(hosts.size());
    const int host = member.shares_memory ? known.try_emplace(member.domain, next).first->second : next;
    if (host == next) hosts.emplace_back();
    host_of[member.rank] = host;
    local_of[member.rank] = locals(host);
    hosts[host].push_back(member.rank);
    slots = std::max(slots, locals(host));
  }
}

Rank Topology::owner(int host, int slot) const {
  const int local = carrier(host, slot);
  return first_slot(host, local) == slot ? hosts[host][local] : kNoRank;
}

}  // namespace muster
