#pragma once

#include "muster/io/connection.h"
#include "muster/transport/link_frame.h"
#include "muster/transport/link_hello.h"

namespace muster {

/// A connection whose ends have agreed to be a link.
struct NegotiatedLink {
  Connection connection;  ///< leftover: bytes that follow the open frame
  Peer peer;
};
using NegotiatedLinkHandler = std::function<void(Result<NegotiatedLink>)>;

/// The step after the handshake. Each end checks the other end's hello and sends an open frame, or a close frame with
/// the reason. So a mismatch is an error at both ends, and there is a link only if both agree. Reads no byte past the
/// open frame, because the next one may carry a descriptor. Destroying it cancels the negotiation without a callback.
class LinkNegotiation {
 public:
  /// `expected` as for check_hello(). The handler is called once, by the loop, and may destroy this.
  LinkNegotiation(Loop& loop, Connection connection, LinkHello self, Rank expected, const Deadline& deadline,
                  NegotiatedLinkHandler handler);
  ~LinkNegotiation();

 private:
  void begin();
  void advance();
  Result<> check();
  void write();
  Result<bool> read();
  Result<bool> fill(size_t bytes);
  void finish(Result<NegotiatedLink> result);
  void stop();

  Loop& loop_;
  Connection connection_;
  const LinkHello self_;
  const Rank expected_;
  Peer peer_;
  NegotiatedLinkHandler handler_;
  Loop::TimerId begin_timer_ = 0, deadline_timer_ = 0;
  Bytes input_;   // the peer's frame, as far as it was read
  Bytes output_;  // the unsent bytes of this end's frame
};

}  // namespace muster
