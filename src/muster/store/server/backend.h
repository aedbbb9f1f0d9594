#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "muster/io/connection.h"
#include "muster/store/session.h"
#include "muster/store/state/state.h"

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
  /// The client's leases have ended (lease.h): it was silent for too long, or is gone. Returns how many revocations
  /// there have been, see StoreState::revoke().
  virtual uint64_t revoke(ClientId client) = 0;
  /// Grants of fewer revocations have ended, whoever they are for.
  virtual uint64_t grants_ended() const = 0;
  /// So many of the clients are proxies now.
  virtual void serves_proxies(size_t count) = 0;
  /// For how long from now clients may use leases.
  virtual Duration lease_left() const = 0;
};

/// Borrows the state, which other loops may use too.
std::unique_ptr<Backend> local_backend(StoreState& state, Backend::Deliver deliver);

struct UpstreamOptions {
  std::string url;
  Credentials credentials;
  size_t max_queue = size_t{1} << 30;  ///< bytes that wait for the link, before requests are refused
  bool merge = false;                  ///< see proxy.h
  std::optional<SessionId> session;    ///< none: chosen by itself
  Duration link_grace = std::chrono::seconds(30);
};
/// A node's proxy: every request goes over one link, which is made anew when it breaks; what was on its way is sent
/// again, and done once. If there is none for `link_grace`, the server has lost its state, or nobody listens at its
/// address any more, everything that waits and whatever comes later is answered with kPeerLost.
Result<std::unique_ptr<Backend>> upstream_backend(Loop& loop, UpstreamOptions options, const Deadline& deadline,
                                                  Backend::Deliver deliver);

}  // namespace muster
