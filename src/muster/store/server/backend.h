#pragma once

#include <functional>
#include <memory>

#include "muster/io/loop.h"
#include "muster/store/server/server.h"
#include "muster/store/state/state.h"

namespace muster {

/// Carries out a server's requests, either in the server's own StoreState or through the server above. Only one loop's
/// thread may use an object.
class Backend {
 public:
  /// Takes replies for any clients. The backend calls it within submit() or later. May leave the vector unchanged.
  using Deliver = std::function<void(Replies&&)>;
  virtual ~Backend() = default;
  virtual void submit(Request request, ClientId client) = 0;
  /// Call this when a client has left. Cancels the client's waits. Replies for the client may still be delivered, and
  /// must then be ignored.
  virtual void drop(ClientId client) = 0;
  /// Ends the client's leases (lease.h). Call this when the client was silent for too long, or has left. Returns the
  /// number of revocations, see StoreState::revoke().
  virtual uint64_t revoke(ClientId client) = 0;
  /// Leases whose Reply::granted is below this number have ended for all clients.
  virtual uint64_t grants_ended() const = 0;
  /// Tells the backend the number of clients that are proxies.
  virtual void serves_proxies(size_t count) = 0;
  /// The time for which clients may use leases from now on.
  virtual Duration lease_left() const = 0;
};

/// Borrows the state, which other loops may use too. A scan of many keys takes several turns of the loop.
std::unique_ptr<Backend> local_backend(StoreState& state, Loop& loop, Backend::Deliver deliver);

/// For a proxy: forwards every request over one link to the server at `options.upstream`. After a broken link it
/// reconnects and sends again what was on its way. Each request is carried out once. All requests fail with kPeerLost
/// if there is no link for `link_grace`, if the server has lost its state, or if the server refuses connections.
Result<std::unique_ptr<Backend>> upstream_backend(Loop& loop, const StoreServerOptions& options,
                                                  const Deadline& deadline, Backend::Deliver deliver);

}  // namespace muster
