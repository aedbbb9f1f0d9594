#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/schedule_builder.h"

namespace muster {

Schedule dissemination_barrier(const CollectiveSpec& spec) {
  ScheduleBuilder builder;
  const Range sent = builder.scratch(1), received = builder.scratch(1);
  uint32_t heard = Step::kNone;
  for (int distance = 1; distance < spec.size; distance *= 2) {
    builder.send(around(spec, distance), sent, {heard});
    heard = builder.receive(around(spec, -distance), received, {heard});
  }
  return builder.take();
}

}  // namespace muster
