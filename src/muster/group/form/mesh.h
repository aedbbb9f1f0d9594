#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "muster/collective/cost/tuning.h"
#include "muster/group/form/topology.h"
#include "muster/group/links/link_table.h"
#include "muster/group/p2p/p2p_engine.h"
#include "muster/io/loop.h"
#include "muster/shm/host_comm.h"

namespace muster {

/// The links of one rank to the others, and the memory that it shares with the ranks of its host. Used by one thread at
/// a time: the one that drives the loop.
struct Mesh {
  std::unique_ptr<Loop> loop;             ///< outlives the links
  std::string name;                       ///< of the group: what was asked for, or the next free name of that kind
  std::vector<RankInfo> members;          ///< by rank
  std::unique_ptr<LinkTable> link_table;  ///< of the collectives
  Topology topology;
  Tuning tuning;                             ///< rank 0's, at all ranks
  Fd host_comm_memory;                       ///< to be attached by the ranks of this host, if there are several
  std::optional<Error> no_host_comm_memory;  ///< why there is none, if there should be
  std::shared_ptr<P2pEngine> p2p;            ///< shared with the Works that it has to finish
  /// "shm" if all ranks share memory, else the kinds of links to the others ("shm+tcp"), connected yet or not.
  std::string transport;
};

/// Exchanges addresses through the store and connects the ranks by the best transport that both ends can use: all pairs
/// of ranks, in large groups a tree. Takes at most until the deadline; the error names the ranks that are missing.
Result<Mesh> form_mesh(Store& store, const GroupSpec& spec, const GroupOptions& options, const Deadline& deadline);

}  // namespace muster
