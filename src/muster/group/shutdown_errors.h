#pragma once

#include <string>

#include "muster/base/error.h"

namespace muster {

/// The error that the other ranks get when a rank leaves its group in order. Example of `member`: "rank 3 (host b, pid
/// 812)".
Error has_left(const std::string& member, Rank rank);
/// The error of pending and later calls at the rank that left.
Error was_shut_down(const std::string& group, Rank self);

}  // namespace muster
