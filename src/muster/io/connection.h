#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/io/address.h"
#include "muster/io/connect/tls.h"
#include "muster/io/loop.h"
#include "muster/io/stream.h"

namespace muster {

/// The proofs that a process gives, and demands from its peer, when it connects.
struct Credentials {
  Bytes secret;                     ///< the job's secret; empty means that only the protocol is checked
  std::shared_ptr<TlsContext> tls;  ///< null: no TLS. Shared: the certificates belong to the process
};

/// A stream to an authenticated peer.
struct Connection {
  std::unique_ptr<Stream> stream;
  Bytes hello;  ///< the peer's description of itself, from the handshake
  Address peer;
  Bytes leftover;  ///< bytes already read that follow the handshake
};
using ConnectionHandler = std::function<void(Result<Connection>)>;

/// An attempt to connect. Destroying it cancels the attempt; the handler is not called any more.
class Dial {
 public:
  virtual ~Dial() = default;
};
struct DialOptions {
  Credentials credentials;
  Bytes hello;
  bool retry = false;
};
/// Connects, does the TLS and muster handshakes, and calls `handler` once on the loop, by the deadline at the latest
/// (never if the Dial is destroyed first). With `retry`, a refused connection is tried again until the deadline, with
/// growing pauses and jitter, because the server may not have started. Authentication and protocol errors are final.
std::unique_ptr<Dial> dial(Loop& loop, const Address& address, DialOptions options, const Deadline& deadline,
                           ConnectionHandler handler);

/// Accepts connections on one address and does the handshake with each. A peer that does not authenticate is refused
/// and logged with its address; the handler does not see it. Thousands of silent peers do not delay an authenticated
/// one for long (handshake_queue.h). On Unix sockets, peers of other users are refused, except root.
class Acceptor {
 public:
  struct Options {
    Credentials credentials;
    Bytes hello;
    Duration handshake_timeout = std::chrono::seconds(10);
    Duration greeting_timeout = std::chrono::seconds(5);  ///< until the peer's first byte
    size_t max_pending = 1024;                            ///< concurrent handshakes; new ones evict old ones
    bool plain = false;                                   ///< no handshake, no TLS: for foreign protocols on loopback
  };
  using Handler = std::function<void(Connection)>;

  /// Port 0 picks a free port; address() returns it.
  static Result<std::unique_ptr<Acceptor>> create(Loop& loop, const Address& address, Options options, Handler handler);
  virtual ~Acceptor() = default;
  virtual Address address() const = 0;
  /// The last refused peer and the reason, as in the log. Empty if no peer was refused.
  virtual const std::string& last_refusal() const = 0;
};

}  // namespace muster
