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
  Credentials credentials;             ///< demanded on the muster dialect's TCP and Unix listeners
  std::vector<Address> muster_listen;  ///< muster's dialect: TCP (port 0 picks one) or Unix
  /// PyTorch's TCPStore protocol, unauthenticated: loopback unless the user insists.
  std::vector<Address> torch_listen;
  /// Bytes queued for a client before it is not listened to any more; one that then reads nothing for `stall_timeout`
  /// is cut off.
  size_t max_reply_queue = 64 << 20;
  Duration stall_timeout = std::chrono::seconds(30);
  /// A client of PyTorch's protocol that stops in the middle of a request, or says nothing to begin with, for so long
  /// is cut off too.
  Duration request_timeout = std::chrono::seconds(60);
  /// 0: one for every two cores, at most 16: the kernel's part of the work is as much again, and those whom the server
  /// answers need a core too. A proxy has one.
  unsigned threads = 0;
  /// As many clients share a thread before another one is used: one thread that is awake serves them with less work
  /// than several that wake in turn.
  size_t few_clients = 128;
  /// Empty: this server holds the data (the root). Otherwise it forwards every request over one multiplexed,
  /// authenticated link to the server there (a node's proxy).
  std::string upstream;  ///< "tcp://host:port" or "unix:..."
  /// Who it is for that server, for the only one to be so; none: chosen at the start. Whoever knows that it has died
  /// may say so there: close_session().
  std::optional<SessionId> session;
  /// As a proxy: answers its clients' reads from leases, and merges their adds and arrivals (proxy.h). Otherwise each
  /// request goes up by itself.
  bool tiered = false;
  /// How long a proxy's link may be away: the proxy tries to come back, the server keeps what it waits for.
  Duration link_grace = std::chrono::seconds(30);
  /// For how long proxies may use leases without a sign of life from here; with very many of them, longer (lease.h). A
  /// change of a key that a silent proxy holds waits a little longer than this.
  Duration lease_time = std::chrono::seconds(4);
};

/// Long enough for any server to start, and to reach an upstream that is starting too.
inline constexpr Duration kServerStartTime = 30s;

/// Serves the store from its own threads until destroyed: every connection belongs to one of them, and threads that
/// work on different keys do not wait for each other.
class StoreServer {
 public:
  /// With an upstream: returns once it is connected, or with its error at the deadline.
  static Result<std::unique_ptr<StoreServer>> start(StoreServerOptions options, const Deadline& deadline);
  virtual ~StoreServer() = default;
  /// As bound (ports filled in), in the order of the options.
  virtual const std::vector<Address>& muster_addresses() const = 0;
  virtual const std::vector<Address>& torch_addresses() const = 0;

  // The following may be called from any thread.

  /// Opens another listener of PyTorch's protocol (port 0 picks one) and returns its address. Its clients' keys get
  /// `prefix` before them, unseen by the clients, so that a restarted job finds nothing of the one before.
  virtual Result<Address> add_torch_listener(const Address& address, Key prefix) = 0;
  /// Closes the listener and the connections of its clients. Nothing happens if there is none at the address.
  virtual void remove_torch_listener(const Address& address) = 0;
  /// Of this server. A proxy counts what passes through it, and holds no keys.
  virtual StoreStat stat() const = 0;
};

}  // namespace muster
