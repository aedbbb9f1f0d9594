#pragma once

#include <string>

#include "muster/base/error.h"

namespace muster::load {

struct ServeOptions {
  std::string upstream;  ///< empty: a root; otherwise proxies of the root at this URL
  size_t count = 1;      ///< how many servers this process has
};

/// Runs store servers with both dialects on loopback, prints their addresses as one line of JSON, and serves until
/// standard input ends. The secret is that of MUSTER_SECRET (hex), none where it is not set.
Result<> serve(const ServeOptions& options);

}  // namespace muster::load
