#include "muster/collective/algorithms/algorithms.h"
#include "muster/collective/schedule/folding.h"
#include "muster/collective/schedule/schedule_builder.h"

namespace muster {

Schedule recursive_doubling_all_reduce(const CollectiveSpec& spec) {
  const Folding fold(spec);
  const Range own = input(0, tensor_bytes(spec)), sum = output(0, tensor_bytes(spec));
  if (fold.folds_away()) return fold.schedule_away(own, sum);
  ScheduleBuilder builder;
  const Range received = builder.scratch(sum.bytes);
  Range current = own;
  uint32_t combined = Step::kNone;  // the step that made `current`
  // Both partners combine the lower rank's data first, so that they get the same bits. The step writes the output, so
  // it depends on the send from there.
  const auto combine = [&](Rank partner, uint32_t arrived, uint32_t sent) {
    combined = builder.reduce(received, current, sum, partner < spec.rank, {arrived, sent});
    current = sum;
  };
  if (fold.paired()) combine(fold.partner(), builder.receive(fold.partner(), received), Step::kNone);
  for (int distance = 1; distance < fold.core(); distance *= 2) {
    const Rank partner = fold.across(distance);
    const uint32_t sent = builder.send(partner, current, {combined});
    combine(partner, builder.receive(partner, received, {combined}), sent);
  }
  if (fold.paired()) builder.send(fold.partner(), current, {combined});
  return builder.take();
}

}  // namespace muster
