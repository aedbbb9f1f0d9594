#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "muster/collective/cost/tuning.h"
#include "muster/group/form/rank_exchange.h"
#include "muster/group/form/topology.h"
#include "muster/group/p2p/p2p_engine.h"
#include "muster/io/loop.h"
#include "muster/shm/host_comm.h"
#include "muster/transport/links/link_table.h"

namespace muster {

/// The links of one rank to the others, and the memory that it shares with the ranks of its host. Used by one thread at
/// a time: the thread that drives the loop.
struct Mesh {
  std::unique_ptr<Loop> loop;     ///< must outlive the links
  std::string name;               ///< of the group: the requested name, or that name with a number (StoreExchange)
  std::vector<RankInfo> members;  ///< by rank
  std::unique_ptr<LinkTable> link_table;  ///< links for collectives; p2p has its own links
  Topology topology;
  Tuning tuning;                             ///< rank 0's, at all ranks
  Fd host_comm_memory;                       ///< for HostComm::attach(); empty if this host has one rank
  std::optional<Error> no_host_comm_memory;  ///< why there is no memory on a host with several ranks
  std::shared_ptr<P2pEngine> p2p;            ///< shared with the Works that it must finish
  /// "shm" if all ranks share memory, else the kinds of links to the other ranks ("shm+tcp"), including links that are
  /// not connected yet.
  std::string transport;
};

/// Exchanges addresses and connects the ranks by the best transport that both ends can use: all pairs of ranks, or a
/// tree in large groups. Fails at the deadline with an error that names the missing ranks.
Result<Mesh> form_mesh(RankExchange& ranks, const GroupOptions& options, const Deadline& deadline);

}  // namespace muster
