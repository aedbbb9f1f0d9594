#include "muster/group/engine/hierarchy_plan.h"

#include <algorithm>

#include "muster/group/engine/hierarchy.h"

namespace muster {

HierarchyPlan plan_hierarchy(const CollectiveSpec& whole, int host_local_size, int cores) {
  const bool blocks = whole.collective == Collective::kAllGather || whole.collective == Collective::kReduceScatter;
  const size_t bytes = whole.count * whole.element_bytes * (blocks ? whole.size : 1);
  HierarchyPlan plan;
  plan.chunk = blocks ? bytes : std::min(bytes, Hierarchy::kChunkBytes);
  plan.chunks = plan.chunk == 0 ? 1 : static_cast<double>(bytes) / static_cast<double>(plan.chunk);

  plan.across = whole;
  plan.across.size = whole.size / host_local_size;
  plan.across.rank = whole.rank / host_local_size;
  plan.across.root = whole.root / host_local_size;
  // The length of the longest shard that Hierarchy::bound() makes.
  const size_t elements = plan.chunk / whole.element_bytes, share = (elements + host_local_size - 1) / host_local_size;
  if (!blocks) plan.across.count = share;

  const auto within = [&](Collective collective, size_t of_bytes) {
    return HostPlanInputs{.collective = collective,
                          .bytes = of_bytes,
                          .ranks = host_local_size,
                          .cores = cores,
                          .element = whole.element_bytes};
  };
  const size_t part = share * whole.element_bytes;
  switch (whole.collective) {
    case Collective::kAllReduce:
      plan.before = within(Collective::kReduceScatter, part);
      plan.after = within(Collective::kAllGather, part);
      break;
    case Collective::kBroadcast:
      plan.before = within(Collective::kBroadcast, plan.chunk);
      plan.after = within(Collective::kAllGather, part);
      break;
    case Collective::kReduce:
      plan.before = within(Collective::kReduceScatter, part);
      plan.after = within(Collective::kAllToAll, part);
      plan.after->to_root = true;
      break;
    case Collective::kAllGather:
      plan.after = within(Collective::kAllGather, part);
      break;
    case Collective::kReduceScatter:
      plan.before = within(Collective::kReduceScatter, part);
      break;
    default:
      plan.before = plan.after = within(Collective::kBarrier, 0);
  }
  if (plan.after) plan.after->in_place = plan.after->collective == Collective::kAllGather;
  return plan;
}

double HierarchyPlan::total(double before_seconds, double across_seconds, double after_seconds) const {
  const double once = before_seconds + across_seconds + after_seconds;
  double each = once;
  if (across.collective == Collective::kAllReduce) each = std::max(across_seconds, before_seconds + after_seconds);
  if (across.collective == Collective::kBroadcast) each = std::max(before_seconds, across_seconds + after_seconds);
  return once + (chunks - 1) * each;
}

}  // namespace muster
