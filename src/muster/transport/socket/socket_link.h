#pragma once

#include "muster/base/clock.h"
#include "muster/io/connection.h"
#include "muster/transport/link.h"

namespace muster {

/// Who this process is and whom it lets in.
struct LinkIdentity {
  Rank rank = kNoRank;
  int size = 0;             ///< world size; a peer that disagrees is refused with kMismatch
  std::string group;        ///< group name; must be equal at both ends
  uint64_t generation = 0;  ///< must be equal: a link of a dead generation is refused with kMismatch
  Credentials credentials;
  Subflow subflow = {};  ///< the count must be equal at both ends
  /// Whether a connection that is refused is tried again until the deadline: the peer may not be up yet.
  bool retry_refused = true;
};

/// Links over TCP and Unix sockets (the address decides). The wire is muster frames; its grammar heads socket_link.cpp.
/// Both ends check rank, size, group and generation in the handshake.
Result<std::unique_ptr<Listener>> listen_links(Loop& loop, const Address& address, LinkIdentity self,
                                               LinkHandler handler);
/// Destroying the Dial gives up. `expected` is the rank that must answer; another one is kMismatch.
std::unique_ptr<Dial> connect_link(Loop& loop, const Address& address, LinkIdentity self, Rank expected,
                                   const Deadline& deadline, ConnectHandler handler);

}  // namespace muster
