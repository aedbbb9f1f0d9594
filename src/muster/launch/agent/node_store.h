#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "muster/launch/options/options.h"
#include "muster/store/server/server.h"
#include "muster/store/ttl_lock.h"

namespace muster {

/// The job's store as this node reaches it. The root's server holds the data; the servers of other nodes are proxies.
/// The node's own workers use a Unix socket or, with PyTorch's protocol, a port of the loopback interface. Only the
/// root's authenticated listener is open on the network, and only if there are several nodes.
struct NodeStore {
  /// --rdzv-endpoint's store, where nodes find the root. Null where node 0 is the root.
  std::unique_ptr<Store> external_store;
  std::unique_ptr<TtlLock> claim;  ///< to be the root; null on other nodes, and if claims do not end with their holder
  std::unique_ptr<StoreServer> server;
  bool root = false;
  bool root_moves = false;  ///< if the root dies, the next root is found through `external_store`
  bool direct = true;       ///< no other node's proxy is between this node and the root
  std::string url;          ///< for this node's workers
  std::string root_url;     ///< for the other nodes; empty on a single node
  std::string upstream;     ///< the server above this node's proxy; empty at the root
  SessionId session{};      ///< of the proxy at that server
  uint16_t torch_port = 0;
  std::string interface;  ///< this host's address towards the root, where workers listen; empty on a single node
  Bytes secret;           ///< the job's; empty only if several nodes were given none
  /// For connections between nodes, if the environment names certificates (io/connect/tls.h); shared as there.
  std::shared_ptr<TlsContext> tls;

  /// Opens a `torch_port` for the keys of this generation, and closes the port of the last generation.
  Result<> open_generation(int generation, uint16_t port);
  /// Removes this root from the external store, if no claim does so. The next job must not find it.
  void give_up_root(const std::string& run_id, const Deadline& deadline);
};

struct NodeStoreEvents {
  std::function<void(std::string)> notice;       ///< for the user
  const std::atomic<bool>* cancelled = nullptr;  ///< if set, stop within a second, or a few seconds for a silent store
};

/// Finds the root or becomes it. Without an external store the root is node 0, or without node ranks the first node on
/// the host with the address --master-addr. With an external store it is the node that has the claim there. Other nodes
/// wait for the root until options.timeout. `direct`: reconnect after the root was lost, without a proxy in between; a
/// root that does not move is not replaced then, and has only options.heartbeat_timeout to answer. kUnavailable names
/// an unknown host or a port in use.
Result<NodeStore> open_node_store(const RunOptions& options, const NodeStoreEvents& events, bool direct = false);

}  // namespace muster
