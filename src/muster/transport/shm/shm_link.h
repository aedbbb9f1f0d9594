#pragma once

#include "muster/transport/socket/socket_link.h"

namespace muster {

/// Links through shared memory between processes of one host: a memfd with one ring per direction, handed over a Unix
/// socket (nothing ever has a name in /dev/shm, so nothing can leak there). The Unix socket stays open: it carries
/// wake-ups for a parked peer, the reason of a close, and tells when the peer dies.
Result<std::unique_ptr<Listener>> listen_shm_links(Loop& loop, const Address& unix_address, LinkIdentity self,
                                                   LinkHandler handler);
std::unique_ptr<Dial> connect_shm_link(Loop& loop, const Address& unix_address, LinkIdentity self, Rank expected,
                                       const Deadline& deadline, ConnectHandler handler);

}  // namespace muster
