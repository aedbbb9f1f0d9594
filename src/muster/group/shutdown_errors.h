#pragma once

#include <string>

#include "muster/base/error.h"

namespace muster {

/// What the other ranks learn when one leaves its group in order. `who`: "rank 3 (host b, pid 812)".
Error has_left(const std::string& who, Rank rank);
/// Whether a peer whose link ended so had formed its group: it has left since, or says in what it failed. Who still
/// forms his goes on: the peer is not needed any more, and he may be the only one to pass its reason on.
bool had_formed(const Error& why);
/// What ends at the rank itself, then and later.
Error was_shut_down(const std::string& group, Rank self);

}  // namespace muster
