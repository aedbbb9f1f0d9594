#pragma once

#include <cstdint>
#include <string>

#include "muster/base/error.h"

namespace muster {

/// Describes a group. Equal at all ranks, except `rank`.
struct GroupSpec {
  Rank rank = 0;
  int size = 1;
  std::string name = "default";
  uint64_t generation = 0;  ///< of the job: ranks of different generations never form a group
};

using Membership [[deprecated("renamed to GroupSpec")]] = GroupSpec;

inline constexpr Rank kAnyRank = -2;  ///< as the sender of a message: receive from any rank

}  // namespace muster
