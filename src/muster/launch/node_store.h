#pragma once

#include <functional>
#include <memory>
#include <string>

#include "muster/launch/options.h"
#include "muster/store/server.h"

namespace muster {

/// The job's store as this node reaches it. Node 0's server is the root and holds the data; the other nodes' servers
/// forward to it. The node's own workers use a Unix socket or, in PyTorch's dialect, a port of the loopback interface:
/// only the root's authenticated listener is open on the network, and only if there are several nodes.
struct NodeStore {
  std::unique_ptr<StoreServer> server;
  bool root = false;
  std::string url;       ///< for this node's workers
  std::string root_url;  ///< for the other nodes; empty on a single node
  uint16_t torch_port = 0;
  std::string interface;  ///< this host's address on the way to the root: where workers listen; empty on a single node
  Bytes secret;           ///< of the job; empty only with several nodes and none given
  /// Between nodes, where the environment names certificates (io/tls.h); shared as there.
  std::shared_ptr<TlsContext> tls;
};

/// Without a node rank the node whose address --master-addr is becomes the root; when several nodes are on that host,
/// the first one. Other nodes wait for the root until options.timeout. `notice` is told what the user should know.
/// kUnavailable names the host that is unknown or the port that is taken.
Result<NodeStore> open_node_store(const RunOptions& options, const std::function<void(std::string)>& notice);

}  // namespace muster
