#pragma once

#include <functional>
#include <vector>

#include "muster/collective/operation.h"
#include "muster/collective/rank_info.h"

namespace muster {

/// Whether MUSTER_DEBUG is "detail", in upper or lower case: then the ranks compare every call before it runs.
/// Otherwise they compare only what costs nothing.
bool fingerprint_check_enabled();

/// Gathers every rank's `own`, by rank, into `all`.
using Exchange = std::function<Result<>(const BufferView& own, const BufferView& all)>;

/// Compares this rank's call with those that the other ranks are about to make, and the counts of all_to_all, which
/// differ between ranks. The kMismatch error says which rank makes which call, and where; all ranks get the same error.
Result<> check_fingerprints(const Operation& operation, const std::vector<RankInfo>& members, Rank self,
                            const Exchange& exchange);

}  // namespace muster
