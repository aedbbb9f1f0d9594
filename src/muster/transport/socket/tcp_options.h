#pragma once

#include "muster/base/clock.h"
#include "muster/base/error.h"

namespace muster {

/// The longest time without an acknowledgment from a TCP peer that should send one.
inline constexpr Duration kTcpSilence = std::chrono::seconds(30);
/// The interval of check_tcp_peer() while bytes wait to be sent.
inline constexpr Duration kTcpCheckInterval = std::chrono::seconds(5);

/// Enables keepalive, so that the kernel notices a dead host on an idle connection. Does nothing for other sockets.
void watch_idle_tcp(int socket);
/// kTimeout if bytes wait for an acknowledgment and the peer's kernel has not answered for kTcpSilence.
/// TCP_USER_TIMEOUT is not used, because it also ends a connection to a live peer that reads slowly.
Result<> check_tcp_peer(int socket);

}  // namespace muster
