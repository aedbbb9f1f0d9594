#pragma once

#include <string>

#include "muster/base/clock.h"
#include "muster/io/connection.h"

namespace muster {

/// What the environment says about the links of this process.
struct LinkOptions {
  Duration timeout = std::chrono::minutes(5);
  std::string interface;  ///< to bind, by name or address; empty: io/outward_address.h chooses
  Credentials credentials;
  std::string transports;  ///< empty: not set
  int tcp_streams = 1;
};

/// Reads MUSTER_TIMEOUT (seconds), MUSTER_INTERFACE, MUSTER_SECRET, MUSTER_TRANSPORT, MUSTER_TCP_STREAMS and
/// MUSTER_TLS_*. kInvalidArgument names a variable that is not valid.
Result<LinkOptions> link_options_from_environment();

}  // namespace muster
