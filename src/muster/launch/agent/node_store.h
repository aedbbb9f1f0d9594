#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "muster/io/address.h"
#include "muster/launch/options/options.h"
#include "muster/store/server/server.h"
#include "muster/store/ttl_lock.h"

namespace muster {

/// The job's store as this node reaches it. The root's server holds the data; the servers of other nodes are proxies.
/// The node's own workers connect to a Unix socket or, with PyTorch's protocol, to a port of the loopback interface.
/// Only the root's authenticated listener is open on the network, and only if there are several nodes. A record of what
/// opening the store has found out.
struct NodeStore {
  /// The store of --rdzv-endpoint, where nodes find the root. Null if node 0 is the root.
  std::unique_ptr<Store> external_store;
  /// The store of a root that leaves, where this node has found the next one. Null if there was none.
  std::unique_ptr<Store> last_root;
  std::unique_ptr<TtlLock> claim;  ///< to be the root; null on other nodes, and if claims do not end with their holder
  std::unique_ptr<StoreServer> server;
  bool root = false;
  bool root_moves = false;  ///< if the root dies, the next root is found through `external_store`
  bool direct = true;       ///< no other node's proxy is between this node and the root
  std::string url;          ///< the store's address for this node's workers
  std::string root_url;     ///< the root's address for the other nodes; empty on a single node
  std::string upstream;     ///< the server above this node's proxy; empty at the root
  SessionId session{};      ///< the proxy's session at that server
  uint16_t torch_port = 0;
  std::string interface;  ///< this host's address towards the root, where workers listen; empty on a single node
  Bytes secret;           ///< the job's; empty only if there are several nodes and none was given
  /// For connections between nodes if the environment names certificates (io/connect/tls.h). Shared as described there.
  std::shared_ptr<TlsContext> tls;

  /// Opens a `torch_port` for the keys of this generation, and closes the port of the last generation.
  Result<> open_generation(int generation, uint16_t port);
  /// Removes this root from the external store if no claim does so, because the next job must not find it.
  void give_up_root(const std::string& run_id, const Deadline& deadline);
};

struct NodeStoreEvents {
  std::function<void(std::string)> notice;       ///< for the user
  const std::atomic<bool>* cancelled = nullptr;  ///< if set, stop within a second, or a few seconds for a silent store
};

/// True for an address of this host.
bool is_local(const Address& address);
/// The URL of a muster store server.
std::string tcp_url(const Address& address);

/// The root that a node had.
struct LastRoot {
  std::string url;      ///< empty: none
  bool leaves = false;  ///< it has told its nodes to move; else it was lost
};

/// Finds the root or becomes it. Without an external store the root is node 0, or without node ranks the first node on
/// the host with the address --master-addr. With an external store the root is the node that has the claim there. Other
/// nodes wait for the root until options.timeout.
/// `last`: if that root leaves, its store shows the next one, and the first node that asks there becomes it. If it
/// was lost, and does not move, it must answer within options.heartbeat_timeout, because no other node replaces it.
/// There is no proxy in between then.
/// kUnavailable: a host is unknown or a port is in use; the message names it.
Result<NodeStore> open_node_store(const RunOptions& options, const NodeStoreEvents& events, LastRoot last = {});

}  // namespace muster
