#pragma once

#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster {

/// How long a TCP peer may be silent where it should answer.
inline constexpr Duration kTcpSilence = std::chrono::seconds(30);
/// How often to ask check_tcp_peer() while bytes are to be sent.
inline constexpr Duration kTcpCheckInterval = std::chrono::seconds(5);

/// Lets the kernel notice a dead host on an idle connection, by keepalive. Does nothing for other sockets.
void watch_idle_tcp(int socket);
/// kTimeout when bytes wait for an acknowledgement and the peer's kernel has not answered for kTcpSilence.
/// TCP_USER_TIMEOUT is not used: it also ends a connection whose peer is alive and only slow to read.
Result<> check_tcp_peer(int socket);

}  // namespace muster
