#pragma once

#include <sys/uio.h>

#include <optional>
#include <span>

#include "muster/base/clock.h"
#include "muster/io/address.h"
#include "muster/io/fd.h"

namespace muster {

/// All sockets are non-blocking and close-on-exec; TCP ones have TCP_NODELAY.

/// Binds and listens with the system's largest backlog. A port in use is kUnavailable, with the address.
Result<Fd> listen_on(const Address& address);
/// Starts to connect. The descriptor becomes writable when the attempt ends. Then finish_connect() returns the result.
Result<Fd> start_connect(const Address& address);
Result<> finish_connect(int fd, const Address& address);
/// Returns an empty optional if no connection waits.
Result<std::optional<Fd>> accept_from(int listener, Address* peer = nullptr);
Result<Address> local_address(int fd);

/// The process at the other end of a Unix socket, as the kernel recorded it in connect().
using UnixPeer = ucred;
Result<UnixPeer> unix_peer(int fd);

/// Sends or receives one descriptor (-1: none) with one byte over a connected Unix socket. Waits until the deadline.
Result<> send_fd(int socket, int fd, const Deadline& deadline);
Result<Fd> receive_fd(int socket, const Deadline& deadline);

}  // namespace muster
