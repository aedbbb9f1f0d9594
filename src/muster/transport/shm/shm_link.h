#pragma once

#include "muster/transport/socket/socket_link.h"

namespace muster {

/// Links through shared memory between processes of one host: a memfd with one ring per direction, passed over a Unix
/// socket. It has no name in /dev/shm, so nothing can leak there. The Unix socket stays open: it carries wake-ups for a
/// parked peer and the reason of a close, and shows the death of the peer.
Result<std::unique_ptr<Listener>> listen_shm_links(Loop& loop, const Address& unix_address, LinkIdentity self,
                                                   LinkHandler handler);
std::unique_ptr<Dial> connect_shm_link(Loop& loop, const Address& unix_address, LinkIdentity self, Rank expected,
                                       const Deadline& deadline, ConnectHandler handler);

}  // namespace muster
