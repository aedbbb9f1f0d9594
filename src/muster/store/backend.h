#pragma once

#include <functional>
#include <memory>

#include "muster/io/connection.h"
#include "muster/store/state.h"

namespace muster {

/// Where a server's requests go: its own StoreState, or the server above it. Lives on one loop's thread.
class Backend {
 public:
  /// Takes replies, for any clients, at once or later. May leave them where they are.
  using Deliver = std::function<void(Replies&&)>;
  virtual ~Backend() = default;
  virtual void submit(Request request, ClientId client) = 0;
  /// The client is gone: what it waits for is cancelled, and no reply for it is delivered any more.
  virtual void drop(ClientId client) = 0;
};

/// Borrows the state, which other loops may use too.
std::unique_ptr<Backend> local_backend(StoreState& state, Backend::Deliver deliver);

struct UpstreamOptions {
  std::string url;
  Credentials credentials;
  size_t max_queue = size_t{1} << 30;  ///< bytes queued for a server that does not read, before requests are refused
};
/// Forwards every request over one link. Once the link is lost, every request is answered with kPeerLost.
Result<std::unique_ptr<Backend>> upstream_backend(Loop& loop, UpstreamOptions options, const Deadline& deadline,
                                                  Backend::Deliver deliver);

}  // namespace muster
