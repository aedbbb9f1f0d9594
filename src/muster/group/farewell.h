#pragma once

#include <string>

#include "muster/base/error.h"

namespace muster {

/// What the other ranks learn when one leaves its group in order. `who`: "rank 3 (host b, pid 812)".
Error has_left(const std::string& who, Rank rank);
/// What ends at the rank itself, then and later.
Error was_shut_down(const std::string& group, Rank self);

}  // namespace muster
