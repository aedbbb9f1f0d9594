#pragma once

#include "cases.h"
#include "peers.h"

namespace muster::load {

/// The start-up of a large job behind proxies: simulated workers, real proxies (the store's own, with all that they
/// merge and keep), real sockets. Each worker adds to the counter of those that came, sets its address, reads those of
/// its peers as torch's clients do (twice WAIT, then GET), and arrives at the barrier of all.
struct Storm {
  Peers peers;
  std::vector<std::string> urls;  ///< of what the proxies connect to, in turn: the root, or a middle tier
  std::string root_url;           ///< to ask what it did
};

/// The time of all of it from the first connection on, and the root's work. The secret is that of MUSTER_SECRET.
Result<Figures> measure_storm(const Setting& setting, const Storm& storm);

}  // namespace muster::load
