#pragma once

#include <functional>
#include <memory>

#include "muster/io/loop.h"
#include "muster/store/server/server.h"
#include "muster/store/state/state.h"

namespace muster {

/// Carries out a server's requests: in its own StoreState, or through the server above. Used by one loop's thread.
class Backend {
 public:
  /// Takes replies for any clients, at once or later. May leave the vector unchanged.
  using Deliver = std::function<void(Replies&&)>;
  virtual ~Backend() = default;
  virtual void submit(Request request, ClientId client) = 0;
  /// The client has left: its waits are cancelled, and no reply for it is delivered.
  virtual void drop(ClientId client) = 0;
  /// The client's leases have ended (lease.h): it was silent for too long, or has left. Returns the number of
  /// revocations, see StoreState::revoke().
  virtual uint64_t revoke(ClientId client) = 0;
  /// Leases granted before so many revocations have ended for all clients.
  virtual uint64_t grants_ended() const = 0;
  /// The number of clients that are proxies.
  virtual void serves_proxies(size_t count) = 0;
  /// How long clients may use leases from now on.
  virtual Duration lease_left() const = 0;
};

/// Borrows the state, which other loops may use too. A scan of many keys takes several turns of the loop.
std::unique_ptr<Backend> local_backend(StoreState& state, Loop& loop, Backend::Deliver deliver);

/// For a proxy: forwards every request over one link to the server at `options.upstream`. A broken link is made again.
/// What was on its way is then sent again, and carried out once. If there is no link for `link_grace`, or the server
/// has lost its state, or refuses connections, then all requests fail with kPeerLost.
Result<std::unique_ptr<Backend>> upstream_backend(Loop& loop, const StoreServerOptions& options,
                                                  const Deadline& deadline, Backend::Deliver deliver);

}  // namespace muster
