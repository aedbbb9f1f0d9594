#pragma once

#include <string>

namespace muster::bench {

struct ManyEndpoints {
  double started = 0;    ///< ms from the first fork until all have joined
  double all_pairs = 0;  ///< ms from then until each has called all others
  int descriptors = 0;   ///< the most that a process has open when it has joined: its own, and none for others
  double floor = 0;      ///< ms from the first fork until as many processes have connected to the store
};

/// Starts `count` processes with an endpoint each, which meet in a store server. `socket`: a path for that server.
/// `transports`: as in rpc::EndpointOptions. Must be called before this process starts threads.
ManyEndpoints start_many_endpoints(const std::string& socket, const std::string& transports, int count);

}  // namespace muster::bench
