#pragma once

#include <functional>
#include <vector>

#include "muster/collective/operation.h"
#include "muster/collective/rank_info.h"

namespace muster {

/// True if MUSTER_DEBUG is "detail", in upper or lower case. Then the ranks compare every call before it runs, at the
/// cost of an extra all_gather per call.
bool fingerprint_check_enabled();

/// An all_gather: writes every rank's `own` to `all`, in the order of the ranks.
using Exchange = std::function<Result<>(const BufferView& own, const BufferView& all)>;

/// Compares this rank's call with the calls that the other ranks are about to make. For an all_to_all with counts it
/// also checks that each rank sends as many elements as the receiver expects. The kMismatch error says which rank makes
/// which call, and at which line of the program. All ranks get the same error.
Result<> check_fingerprints(const Operation& operation, const std::vector<RankInfo>& members, Rank self,
                            const Exchange& exchange);

}  // namespace muster
