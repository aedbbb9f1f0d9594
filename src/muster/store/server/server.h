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
  Credentials credentials;             ///< which clients of muster's protocol must have
  std::vector<Address> muster_listen;  ///< for muster's protocol: TCP (port 0 picks one) or Unix
  /// For PyTorch's TCPStore protocol, which has no authentication: loopback unless the user wants otherwise.
  std::vector<Address> torch_listen;
  /// If more than this many bytes are queued for a client, the server stops reading from it. If the client then reads
  /// nothing for `stall_timeout`, its connection is closed.
  size_t max_reply_queue = 64 << 20;
  Duration stall_timeout = std::chrono::seconds(30);
  /// The server also closes a client of PyTorch's protocol that sends no first request, or stops in the middle of a
  /// request, for this long.
  Duration request_timeout = std::chrono::seconds(60);
  /// 0: half the number of cores, at most 16. The other cores are for the kernel's part of the work, which takes about
  /// as much time again, and for the clients. A proxy always has one thread.
  unsigned threads = 0;
  /// The server uses a second thread once the first has this many clients, and so on. One thread that stays awake does
  /// less work than several threads that wake in turn.
  size_t few_clients = 128;
  /// If empty, this server is the root, which holds the data. Otherwise it is a proxy, which forwards requests over one
  /// authenticated link to the server at this URL.
  std::string upstream;  ///< "tcp://host:port" or "unix:..."
  /// The proxy's identity, which must be unique. If not set, the server chooses one at the start. A process that knows
  /// that the proxy has died can end its session with close_session().
  std::optional<SessionId> session;
  /// A proxy with this option answers reads from leases, and merges adds and barrier arrivals (proxy.h). Without it,
  /// each request goes up unchanged.
  bool tiered = false;
  /// How long a proxy and its server keep a session without a link. During this time the proxy tries to reconnect.
  Duration link_grace = std::chrono::seconds(30);
  /// How long a proxy may use leases after its latest keepalive. With thousands of proxies this time is longer
  /// (lease.h). If a silent proxy holds a lease of a key, a change of the key waits a little longer than this.
  Duration lease_time = std::chrono::seconds(4);
};

/// A timeout that is long enough for a server to start and to reach an upstream server that is starting too.
inline constexpr Duration kServerStartTime = 30s;

/// Serves the store from its own threads until it is destroyed. A connection belongs to one thread. Threads that work
/// on different keys rarely wait for each other.
class StoreServer {
 public:
  /// With an upstream: returns once it is connected, or fails at the deadline.
  static Result<std::unique_ptr<StoreServer>> start(StoreServerOptions options, const Deadline& deadline);
  virtual ~StoreServer() = default;
  /// The addresses as bound, with the ports filled in, in the order of the options.
  virtual const std::vector<Address>& muster_addresses() const = 0;
  virtual const std::vector<Address>& torch_addresses() const = 0;

  // The following functions are thread-safe.

  /// Opens another listener for PyTorch's protocol (port 0 picks one) and returns its address. The server adds `prefix`
  /// to the keys of its clients, and the clients do not see it. So a restarted job does not find the keys of the job
  /// before.
  virtual Result<Address> add_torch_listener(const Address& address, Key prefix) = 0;
  /// Closes the listener and its clients' connections. Does nothing if there is no listener at the address.
  virtual void remove_torch_listener(const Address& address) = 0;
  /// The statistics of this server. A proxy counts the requests that pass through it. It has no keys.
  virtual StoreStat stat() const = 0;
};

}  // namespace muster
