#include "muster/collective/schedule_builder.h"

namespace muster {

// Ranks count from the root. A rank's parent is itself without its lowest set bit; its children are itself plus each
// lower power of two, the largest subtree first.
Schedule binomial_broadcast(const Problem& problem) {
  check_problem(problem);
  const Rank self = (problem.rank - problem.root + problem.size) % problem.size;
  const auto real = [&](Rank relative) { return (relative + problem.root) % problem.size; };
  const int lowest = self == 0 ? 1 << doubling_rounds(problem.size) : self & -self;
  const Place source = self == 0 ? Place::kInput : Place::kOutput;
  const Chunks chunks{0, problem.count * problem.element_bytes, chunk_grain(problem)};
  ScheduleBuilder builder;
  for (uint32_t i = 0; i < chunks.count(); ++i) {
    uint32_t arrived = Step::kNone;
    if (self != 0) arrived = builder.receive(real(self - lowest), chunks.at(Place::kOutput, i));
    for (int distance = lowest / 2; distance > 0; distance /= 2) {
      if (self + distance < problem.size) builder.send(real(self + distance), chunks.at(source, i), {arrived});
    }
    if (self == 0) builder.copy(chunks.at(Place::kInput, i), chunks.at(Place::kOutput, i));
  }
  return builder.take();
}

// With the tree's depth hidden by chunks it serves large messages too.
Schedule choose_broadcast(const Problem& problem) { return binomial_broadcast(problem); }

}  // namespace muster
