#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/io/connection.h"
#include "muster/store/session.h"
#include "muster/store/stat.h"
#include "muster/store/store.h"

namespace muster {

struct StoreServerOptions {
  Credentials credentials;             ///< that clients of muster's protocol must have
  std::vector<Address> muster_listen;  ///< for muster's protocol: TCP (port 0 picks one) or Unix
  /// For PyTorch's TCPStore protocol, which has no authentication: loopback unless the user wants otherwise.
  std::vector<Address> torch_listen;
  /// With more bytes queued for a client, the server stops reading from it. If the client then reads nothing for
  /// `stall_timeout`, its connection is closed.
  size_t max_reply_queue = 64 << 20;
  Duration stall_timeout = std::chrono::seconds(30);
  /// A client of PyTorch's protocol that sends no first request, or stops in the middle of one, for so long is closed
  /// too.
  Duration request_timeout = std::chrono::seconds(60);
  /// 0: half the number of cores, at most 16. The kernel's part of the work takes as long again, and the clients need
  /// cores too. A proxy has one thread.
  unsigned threads = 0;
  /// A second thread is used once the first has this many clients, and so on: one thread that stays awake does less
  /// work than several that wake in turn.
  size_t few_clients = 128;
  /// Empty: this server is the root, which holds the data. Otherwise it is a proxy, which forwards requests over one
  /// authenticated link to the server at this URL.
  std::string upstream;  ///< "tcp://host:port" or "unix:..."
  /// The proxy's identity, which must be unique; none: chosen at the start. A process that knows that the proxy has
  /// died can end its session: close_session().
  std::optional<SessionId> session;
  /// A proxy with this option answers reads from leases, and merges adds and barrier arrivals (proxy.h). Without it,
  /// each request goes up unchanged.
  bool tiered = false;
  /// How long a proxy and its server keep a session without a link. The proxy tries to reconnect meanwhile.
  Duration link_grace = std::chrono::seconds(30);
  /// How long a proxy may use leases after its latest keepalive; with very many proxies, longer (lease.h). A change of
  /// a key that a silent proxy holds waits a little longer than this.
  Duration lease_time = std::chrono::seconds(4);
};

/// Enough time for a server to start and to reach an upstream that is starting too.
inline constexpr Duration kServerStartTime = 30s;

/// Serves the store from its own threads until it is destroyed. A connection belongs to one thread. Threads that work
/// on different keys rarely wait for each other.
class StoreServer {
 public:
  /// With an upstream: returns once it is connected, or fails at the deadline.
  static Result<std::unique_ptr<StoreServer>> start(StoreServerOptions options, const Deadline& deadline);
  virtual ~StoreServer() = default;
  /// As bound (ports filled in), in the order of the options.
  virtual const std::vector<Address>& muster_addresses() const = 0;
  virtual const std::vector<Address>& torch_addresses() const = 0;

  // The following may be called from any thread.

  /// Opens another listener for PyTorch's protocol (port 0 picks one) and returns its address. `prefix` is added to its
  /// clients' keys, and the clients do not see it. So a restarted job finds no keys of the one before.
  virtual Result<Address> add_torch_listener(const Address& address, Key prefix) = 0;
  /// Closes the listener and its clients' connections. Does nothing if there is no listener at the address.
  virtual void remove_torch_listener(const Address& address) = 0;
  /// The figures of this server. A proxy counts the requests that pass through it; it has no keys.
  virtual StoreStat stat() const = 0;
};

}  // namespace muster
