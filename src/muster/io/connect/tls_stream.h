#pragma once

#include <openssl/ssl.h>

#include "muster/io/stream.h"

namespace muster {

/// TLS over a socket. Takes ownership of `ssl`, which has its side set and no socket yet. Private to io.
std::unique_ptr<Stream> tls_stream(SSL* ssl, Fd socket);

}  // namespace muster
