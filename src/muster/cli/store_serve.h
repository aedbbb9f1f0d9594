#pragma once

#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/error.h"

namespace muster {

/// The options of `muster store serve`. Addresses are "host:port" (or an interface's name for the host),
/// "unix:/path" or "unix:@name".
struct ServeOptions {
  std::vector<std::string> listen;        ///< for muster's protocol
  std::vector<std::string> torch_listen;  ///< for PyTorch's TCPStore protocol
  unsigned threads = 0;                   ///< 0: one per two cores, and one for a proxy
  std::string upstream;                   ///< the URL of a store server, to be its proxy; empty: hold the data
  bool tiered = false;                    ///< as a proxy: merge requests, and answer reads from leases
  Bytes secret;
};

/// Serves until SIGINT or SIGTERM. Prints its addresses when it listens.
Result<> serve_store(const ServeOptions& options);

}  // namespace muster
