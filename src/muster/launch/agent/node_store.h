#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "muster/launch/options/options.h"
#include "muster/store/server/server.h"
#include "muster/store/ttl_lock.h"

namespace muster {

/// The job's store as this node reaches it. The root's server holds the data; the other nodes' servers forward to it.
/// The node's own workers use a Unix socket or, in PyTorch's dialect, a port of the loopback interface: only the root's
/// authenticated listener is open on the network, and only if there are several nodes.
struct NodeStore {
  /// --rdzv-endpoint's store, where nodes find the root. Null where node 0 is the root.
  std::unique_ptr<Store> external_store;
  std::unique_ptr<TtlLock> claim;  ///< to be the root; null elsewhere, and where claims do not end with their holder
  std::unique_ptr<StoreServer> server;
  bool root = false;
  bool root_moves = false;  ///< where the root dies, another one is found through `outside`
  bool direct = true;       ///< no other node's proxy is between this one and the root
  std::string url;          ///< for this node's workers
  std::string root_url;     ///< for the other nodes; empty on a single node
  std::string upstream;     ///< where this node's proxy reports to; empty at the root
  SessionId session{};      ///< and who it is there
  uint16_t torch_port = 0;
  std::string interface;  ///< this host's address on the way to the root: where workers listen; empty on a single node
  Bytes secret;           ///< of the job; empty only with several nodes and none given
  /// Between nodes, where the environment names certificates (io/tls.h); shared as there.
  std::shared_ptr<TlsContext> tls;

  /// From now on `torch_port` leads to the keys of this generation, and that of the one before leads nowhere.
  Result<> open_generation(int generation, uint16_t port);
  /// Lets the next job find no root where this one was, if it was and no claim says so.
  void give_up_root(const std::string& run_id, const Deadline& deadline);
};

struct NodeStoreEvents {
  std::function<void(std::string)> notice;       ///< what the user should know
  const std::atomic<bool>* cancelled = nullptr;  ///< set: give up within a second, or a few for a silent store
};

/// Finds the root or becomes it. Without an outside store the root is node 0, or without node ranks the node whose
/// address --master-addr is; when several nodes are on that host, the first one. With one it is the node whose claim
/// stands there. Other nodes wait for the root until options.timeout. `direct`: again, after what led to the root was
/// lost: link to it even where tiers have a proxy between. A root that cannot move is then neither replaced nor waited
/// for beyond options.heartbeat_timeout. kUnavailable names the host that is unknown or the port that is taken.
Result<NodeStore> open_node_store(const RunOptions& options, const NodeStoreEvents& events, bool direct = false);

}  // namespace muster
