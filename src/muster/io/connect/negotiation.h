#pragma once

#include "muster/io/connect/handshake.h"
#include "muster/io/connection.h"

namespace muster {

/// Turns a connected socket into a Connection: TLS if it is set up, then the handshake. Private to io.
class Negotiation {
 public:
  static Result<Negotiation> begin(Fd socket, Handshake::Side side, const Credentials& credentials, ByteView hello);

  /// Continues as far as the socket allows. True once both ends have authenticated.
  Result<bool> advance();
  /// The epoll events to watch the socket for after advance() returned false.
  uint32_t interest() const;
  int fd() const { return stream_->fd(); }
  /// Tells a client that has no handshake the reason of a refusal. It fits into the empty buffer of a new socket.
  static void send_refusal(int socket, Handshake::Refusal reason);
  /// Sends the reason of a refusal to the client, if the socket takes it. A client that is still in its TLS handshake
  /// only sees that the connection closes.
  void reject(Handshake::Refusal reason);
  /// Only after advance() returned true.
  Connection finish(Address peer) &&;

 private:
  Negotiation(std::unique_ptr<Stream> stream, Handshake handshake)
      : stream_(std::move(stream)), handshake_(std::move(handshake)) {}
  /// True if everything is sent.
  Result<bool> flush();
  /// True if there may be more to read.
  Result<bool> read_some();
  Result<bool> step();

  std::unique_ptr<Stream> stream_;
  Handshake handshake_;
  Bytes output_;
  Bytes leftover_;
  bool may_be_plain_ = false;  // at a server with TLS, until the TLS handshake is over
};

/// "30", "0.1": seconds as a message shows them.
std::string seconds(Duration duration);

}  // namespace muster
