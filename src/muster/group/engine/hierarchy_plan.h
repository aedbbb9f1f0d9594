#pragma once

#include <optional>

#include "muster/collective/host/host_plan.h"
#include "muster/collective/schedule/schedule.h"

namespace muster {

/// The parts of a collective over several hosts with equally many ranks: Hierarchy (hierarchy.h) in figures.
struct HierarchyPlan {
  size_t chunk = 0;                      ///< bytes of the tensor that the parts below are about
  double chunks = 1;                     ///< how many of these the tensor has
  std::optional<HostPlanInputs> before;  ///< within a host, all hosts at once or the root's only
  CollectiveSpec across;                 ///< what each rank does with its counterparts on the other hosts
  std::optional<HostPlanInputs> after;   ///< within a host

  /// Seconds of the whole, from those of the parts: of several chunks one crosses while others are within their hosts,
  /// as far as the collective allows.
  double total(double before_seconds, double across_seconds, double after_seconds) const;
};

/// For a collective that Hierarchy has. `whole` is the problem of all ranks, of which each `locals` share a host.
HierarchyPlan plan_hierarchy(const CollectiveSpec& whole, int host_local_size, int cores);

}  // namespace muster
