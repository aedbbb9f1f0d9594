#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "muster/group/rendezvous.h"
#include "muster/group/topology.h"
#include "muster/io/loop.h"
#include "muster/transport/link.h"
#include "muster/transport/shm/team.h"

namespace muster {

/// The links of one rank to all others, and the memory that it shares with the ranks of its host. Used by one thread at
/// a time: the one that drives the loop.
struct Mesh {
  std::unique_ptr<Loop> loop;                ///< outlives the links
  std::vector<Member> members;               ///< by rank
  std::vector<std::unique_ptr<Link>> links;  ///< by rank; null at the own
  Topology topology;
  Fd team_memory;  ///< to be attached by the ranks of this host, where there are
                   ///< several

  std::string transport() const;
};

/// Meets through the store and links up with every other rank by the best transport that both can use. Within the
/// deadline, or an error that names who is missing.
Result<Mesh> form_mesh(Store& store, const Membership& membership, const GroupOptions& options,
                       const Deadline& deadline);

}  // namespace muster
