#pragma once

#include <functional>
#include <vector>

#include "muster/collective/operation.h"
#include "muster/collective/rank_info.h"

namespace muster {

/// Whether MUSTER_DEBUG is "detail", in capitals or not: every call is compared at all ranks before any of it runs.
/// Without it, what is compared is what costs nothing.
bool fingerprint_check_enabled();

/// Gathers every rank's `own`, by rank, into `all`.
using Exchange = std::function<Result<>(const BufferView& own, const BufferView& all)>;

/// Compares the call with those that the others are about to make: also counts that no two ranks need share, as those
/// of all_to_all. kMismatch says who calls what, and where; all ranks get the same error.
Result<> check_fingerprints(const Operation& operation, const std::vector<RankInfo>& members, Rank self,
                            const Exchange& exchange);

}  // namespace muster
