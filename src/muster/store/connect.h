#pragma once

#include <string>

#include "muster/io/connection.h"
#include "muster/store/session.h"

namespace muster {

/// The hello of both ends of a connection with muster's protocol.
inline constexpr std::string_view kStoreHello = "muster store";

/// Connects to the store server at "tcp://host:port", "unix:/path" or "unix:@name". Retries until the deadline if the
/// server is not up yet. A wrong secret fails at once with kAuthentication. The stream is not attached to a loop. Unix
/// sockets use no TLS, because the bytes stay in the kernel.
Result<Connection> connect_to_store(const std::string& url, const Credentials& credentials, const Deadline& deadline,
                                    ByteView hello = as_bytes(kStoreHello));

/// Tells the server to end the session of a dead proxy at once. This also ends the waits of the proxy's clients.
Result<> close_session(const std::string& url, const Credentials& credentials, const SessionId& session,
                       const Deadline& deadline);

/// The options to dial a store's address.
DialOptions store_dial_options(const Address& address, const Credentials& credentials, ByteView hello);

}  // namespace muster
