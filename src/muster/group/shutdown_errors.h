#pragma once

#include <string>

#include "muster/base/error.h"

namespace muster {

/// What the other ranks receive when a rank leaves its group in order. `member`: "rank 3 (host b, pid 812)".
Error has_left(const std::string& member, Rank rank);
/// How calls end at the rank that left, then and later.
Error was_shut_down(const std::string& group, Rank self);

}  // namespace muster
