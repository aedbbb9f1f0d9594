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

/// What a process shows and demands when it connects.
struct Credentials {
  Bytes secret;                     ///< the job's secret; empty means that only the protocol is checked
  std::shared_ptr<TlsContext> tls;  ///< null: no TLS. Shared: the certificates belong to the process
};

/// A stream whose peer has proved itself.
struct Connection {
  std::unique_ptr<Stream> stream;
  Bytes hello;  ///< what the peer said about itself in the handshake
  Address peer;
  Bytes leftover;  ///< bytes already read that follow the handshake
};
using ConnectionHandler = std::function<void(Result<Connection>)>;

/// An attempt under way. Destroying it gives up silently: its handler is not called any more.
class Dial {
 public:
  virtual ~Dial() = default;
};
/// Connects, does TLS if asked, shakes hands, and calls `handler` once on the loop: within the deadline, always (unless
/// the Dial is destroyed first). With `retry`, a refused connection (the server is not up yet) is tried again, with
/// growing pauses and jitter, until the deadline; authentication and protocol errors are final.
struct DialOptions {
  Credentials credentials;
  Bytes hello;
  bool retry = false;
};
std::unique_ptr<Dial> dial(Loop& loop, const Address& address, DialOptions options, const Deadline& deadline,
                           ConnectionHandler handler);

/// Accepts connections on one address and shakes hands with each: a stranger is refused, logged with its address and
/// never reaches the handler. Strangers by the thousand that say nothing hold up no member for long
/// (handshake_queue.h). Unix sockets: a peer of another uid (root excepted) is refused.
class Acceptor {
 public:
  struct Options {
    Credentials credentials;
    Bytes hello;
    Duration handshake_timeout = std::chrono::seconds(10);
    Duration greeting_timeout = std::chrono::seconds(5);  ///< for the first byte of it
    size_t max_pending = 1024;  ///< handshakes under way; for more, the first of them give way
    bool plain = false;         ///< no handshake, no TLS: for foreign protocols on loopback
  };
  using Handler = std::function<void(Connection)>;

  /// Port 0 picks a free one: ask address().
  static Result<std::unique_ptr<Acceptor>> create(Loop& loop, const Address& address, Options options, Handler handler);
  virtual ~Acceptor() = default;
  virtual Address address() const = 0;
  /// Who was refused last, and why, as the log says it; empty while nobody was.
  virtual const std::string& last_refusal() const = 0;
};

}  // namespace muster
