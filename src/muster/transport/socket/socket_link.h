#pragma once

#include "muster/base/clock.h"
#include "muster/io/connection.h"
#include "muster/transport/link.h"

namespace muster {

/// The identity that this process announces, and the peers that it accepts.
struct LinkIdentity {
  Rank rank = kNoRank;
  int size = 0;             ///< world size; a peer that disagrees is refused with kMismatch
  std::string group;        ///< group name; must be equal at both ends
  uint64_t generation = 0;  ///< must be equal: a link of a dead generation is refused with kMismatch
  Credentials credentials;
  Subflow subflow = {};  ///< the count must be equal at both ends
  /// Retry a refused connection until the deadline, because the peer may not have started yet.
  bool retry_refused = true;
};

/// Links over TCP or Unix sockets, depending on the address. The grammar of the frames is at the head of
/// socket_link.cpp. Both ends check rank, size, group and generation in the handshake.
Result<std::unique_ptr<Listener>> listen_links(Loop& loop, const Address& address, LinkIdentity self,
                                               LinkHandler handler);
/// Destroying the Dial cancels the attempt. `expected` is the rank that must answer; another rank is kMismatch.
std::unique_ptr<Dial> connect_link(Loop& loop, const Address& address, LinkIdentity self, Rank expected,
                                   const Deadline& deadline, ConnectHandler handler);

}  // namespace muster
