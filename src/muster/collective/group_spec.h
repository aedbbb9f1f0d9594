#pragma once

#include <cstdint>
#include <string>

#include "muster/base/error.h"

namespace muster {

/// Who takes part. Equal at all ranks but for `rank`.
struct GroupSpec {
  Rank rank = 0;
  int size = 1;
  std::string name = "default";
  uint64_t generation = 0;  ///< of the job: a restarted job's ranks never meet those of the dead generation
};

using Membership [[deprecated("renamed to GroupSpec")]] = GroupSpec;

inline constexpr Rank kAnyRank = -2;  ///< as the sender of a message to receive: any rank

}  // namespace muster
