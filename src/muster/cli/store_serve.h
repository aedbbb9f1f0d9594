#pragma once

#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/error.h"

namespace muster {

/// What `muster store serve` was asked to do. Addresses are "host:port" (or an interface's name for the host),
/// "unix:/path" or "unix:@name".
struct ServeOptions {
  std::vector<std::string> listen;        ///< muster's dialect
  std::vector<std::string> torch_listen;  ///< PyTorch's TCPStore protocol
  unsigned threads = 0;                   ///< 0: one for every two cores; a proxy has one
  std::string upstream;                   ///< a store server's URL: be a proxy of it; empty: hold the data
  bool tiered = false;                    ///< as a proxy: merge and answer what it can by itself
  Bytes secret;
};

/// Serves until SIGINT or SIGTERM; prints where, once it does.
Result<> serve_store(const ServeOptions& options);

}  // namespace muster
