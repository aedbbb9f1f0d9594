#pragma once

#include <string>
#include <vector>

#include "muster/store/server/server.h"

namespace muster {

/// The options of `muster store serve`. Addresses are "host:port" (or an interface's name for the host),
/// "unix:/path" or "unix:@name".
struct ServeOptions {
  std::vector<std::string> listen;        ///< for muster's protocol
  std::vector<std::string> torch_listen;  ///< for PyTorch's TCPStore protocol
  StoreServerOptions server;              ///< the other options; serve_store() sets the addresses and TLS
};

/// Serves until SIGINT or SIGTERM. Prints its addresses when it listens.
Result<> serve_store(const ServeOptions& options);

}  // namespace muster
