#pragma once

#include "cases.h"
#include "peers.h"

namespace muster::load {

/// A job's start-up, as torch 2.13 does it over TCPStore (recorded from `torchrun` with the static rendezvous and
/// init_process_group("gloo"), whose prefixes the keys have), and a barrier:
///
///   an agent a node   its role and rank to the first agent, which gathers all and hands out the ranks
///   a worker          ADD init/; SET its address; of each of its peers, twice WAIT and then GET the address; BARRIER
///
/// With Gloo's full mesh an address record grows by 8 bytes a worker.
struct Startup {
  Peers peers;
  std::vector<Address> servers;  ///< of each node; or one, for all
  std::string root_url;          ///< muster's own dialect at the root, to ask what it has done; may be empty
  bool agents = true;            ///< false: workers alone, as behind a Storm's proxies
};

/// The time of all of it, and the root's work: its CPU time, and the messages and bytes that it read and wrote. Where
/// the root cannot be asked, these are what the clients exchanged with it.
Result<Figures> measure_startup(const Setting& setting, const Startup& startup);

}  // namespace muster::load
