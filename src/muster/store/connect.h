#pragma once

#include <string>

#include "muster/io/connection.h"
#include "muster/store/session.h"

namespace muster {

/// What both ends of a muster-dialect connection say in the handshake.
inline constexpr std::string_view kStoreHello = "muster store";

/// Connects to the store server at "tcp://host:port", "unix:/path" or "unix:@name". A server that is not up yet is
/// tried again until the deadline; a wrong secret is kAuthentication at once. The stream belongs to no loop.
/// Unix sockets use no TLS: the kernel vouches for the other end.
Result<Connection> connect_to_store(const std::string& url, const Credentials& credentials, const Deadline& deadline,
                                    ByteView hello = as_bytes(kStoreHello));

/// For who knows that a proxy of the server has died: its session ends at once, and all that its clients waited for.
Result<> close_session(const std::string& url, const Credentials& credentials, const SessionId& session,
                       const Deadline& deadline);

/// Where a store's URL leads, names looked up.
Result<std::vector<Address>> addresses_of_store(const std::string& url);
/// How to dial each of them.
DialOptions store_dial_options(const Address& address, const Credentials& credentials, ByteView hello);

}  // namespace muster
