#pragma once

#include <string>
#include <vector>

#include "muster/base/error.h"

namespace muster::load {

struct ServeOptions {
  std::vector<std::string> upstreams;  ///< none: a root; otherwise proxies of what is at these URLs, in turn
  size_t count = 1;                    ///< how many servers this process has
};

/// Runs store servers with both dialects on loopback, prints their addresses as one line of JSON, and serves until
/// standard input ends. The secret is that of MUSTER_SECRET (hex), none where it is not set.
Result<> serve(const ServeOptions& options);

}  // namespace muster::load
