#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "muster/collective/cost/tuning.h"
#include "muster/group/engine/link_table.h"
#include "muster/group/form/rank_exchange.h"
#include "muster/group/form/topology.h"
#include "muster/group/p2p/p2p_engine.h"
#include "muster/io/loop.h"
#include "muster/shm/host_comm.h"

namespace muster {

/// Groups up to this size link all pairs when they form.
inline constexpr int kMaxFullMesh = 16;
/// A larger group links a tree when it forms, in which a rank has so many children, for news to travel along, and what
/// a schedule needs when it needs it.
inline constexpr int kTreeWidth = 4;
inline Rank tree_parent(Rank rank) { return (rank - 1) / kTreeWidth; }

/// The links of one rank to others, and the memory that it shares with the ranks of its host. Used by one thread at a
/// time: the one that drives the loop.
struct Mesh {
  std::unique_ptr<Loop> loop;             ///< outlives the links
  std::string name;                       ///< of the group: what was asked for, or the next of that name that was free
  std::vector<RankInfo> members;          ///< by rank
  std::unique_ptr<LinkTable> link_table;  ///< holds the links, and makes more
  Topology topology;
  Tuning tuning;                             ///< rank 0's, at all ranks
  Fd host_comm_memory;                       ///< to be attached by the ranks of this host, where there are several
  std::optional<Error> no_host_comm_memory;  ///< why there is none, where there should be
  /// Listens, and is to be begun with the places. Shared with the Works that it has to finish.
  std::shared_ptr<P2pEngine> p2p;
  std::vector<P2pEngine::Place> places;  ///< by rank
  /// "shm" where all ranks share memory, else the kinds of links to the others ("shm+tcp"), made yet or not.
  std::string transport;
};

/// Meets through the store and links up by the best transport that both ends can use: with every other rank, in large
/// groups with a few, so that the rest can be linked when it is needed. Within the deadline, or an error that names who
/// is missing.
Result<Mesh> form_mesh(Store& store, const GroupSpec& membership, const GroupOptions& options,
                       const Deadline& deadline);

}  // namespace muster
