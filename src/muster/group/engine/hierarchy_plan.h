#pragma once

#include <optional>

#include "muster/collective/host/host_plan.h"
#include "muster/collective/schedule/schedule.h"

namespace muster {

/// A cost model of Hierarchy (hierarchy.h): the parts of a collective over several hosts that all have the same number
/// of ranks.
struct HierarchyPlan {
  size_t chunk = 0;                      ///< bytes of the tensor that the parts below process
  double chunks = 1;                     ///< the number of chunks in the tensor; may be a fraction
  std::optional<HostPlanInputs> before;  ///< within a host; all hosts at once, or only the root's host
  CollectiveSpec across;                 ///< between each rank and its counterparts on the other hosts
  std::optional<HostPlanInputs> after;   ///< within a host

  /// Seconds of the whole collective, computed from the seconds of its parts. all_reduce and broadcast with several
  /// chunks exchange one chunk between hosts while they process another one within the hosts.
  double total(double before_seconds, double across_seconds, double after_seconds) const;
};

/// Only for collectives for which Hierarchy::has() is true. `whole` describes the collective over all ranks; each host
/// has `host_local_size` of them.
HierarchyPlan plan_hierarchy(const CollectiveSpec& whole, int host_local_size, int cores);

}  // namespace muster
