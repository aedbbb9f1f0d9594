#pragma once

#include <vector>

#include "muster/base/error.h"

namespace muster::load {

/// How many bytes a request has, and how many answer it.
struct Turn {
  size_t request = 0;
  size_t reply = 0;
};

/// What the floor is: the least that one thread of a server on this kernel can do. It counts bytes, looks at none of
/// them, and answers with zeros.
struct EchoPlan {
  Turn greeting;
  std::vector<Turn> turns;  ///< one after the other, over and over
  /// So many requests, from whichever clients, are answered together when the last is there. 0: each at once.
  size_t gather = 0;
};

/// Serves on a listening socket until the process is killed.
Result<> serve_echo(int listener, const EchoPlan& plan);

}  // namespace muster::load
