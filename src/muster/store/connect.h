#pragma once

#include <string>

#include "muster/io/connection.h"
#include "muster/store/session.h"

namespace muster {

/// The hello of both ends of a connection with muster's protocol.
inline constexpr std::string_view kStoreHello = "muster store";

/// Connects to the store server at "tcp://host:port", "unix:/path" or "unix:@name". Retries until the deadline if the
/// server is not up yet; a wrong secret is kAuthentication at once. The stream belongs to no loop. Unix sockets use no
/// TLS, because the bytes stay in the kernel.
Result<Connection> connect_to_store(const std::string& url, const Credentials& credentials, const Deadline& deadline,
                                    ByteView hello = as_bytes(kStoreHello));

/// Ends the session of a proxy that has died, and the waits of its clients, at once.
Result<> close_session(const std::string& url, const Credentials& credentials, const SessionId& session,
                       const Deadline& deadline);

/// The addresses of a store's URL. Resolves host names.
Result<std::vector<Address>> addresses_of_store(const std::string& url);
/// The options to dial one of them.
DialOptions store_dial_options(const Address& address, const Credentials& credentials, ByteView hello);

}  // namespace muster
