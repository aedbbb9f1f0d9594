#include "muster/collective/cost/cost.h"

#include <bit>
#include <cmath>

#include "muster/collective/schedule/blocks.h"

namespace muster {
namespace {

double total_bytes(const CollectiveSpec& spec) {
  const bool in_blocks = has_input_blocks(spec.collective) || has_output_blocks(spec.collective);
  return static_cast<double>(in_blocks ? Blocks::of_ranks(spec).total() : tensor_bytes(spec));
}

}  // namespace

CostInputs::CostInputs(const CollectiveSpec& spec)
    : ranks(spec.size),
      doublings(doubling_rounds(spec.size)),
      core(std::bit_floor(static_cast<unsigned>(spec.size))),
      halvings(std::log2(core)),
      folds(core == ranks ? 0 : 1),
      bytes(total_bytes(spec)),
      chunk(static_cast<double>(chunk_grain(spec))) {}

double CostInputs::chunks(double of_bytes) const { return std::max(1.0, std::ceil(of_bytes / chunk)); }

double predict(const CollectiveSpec& spec, const Algorithm& algorithm) {
  const CostModel& costs = spec.costs;
  const Estimate estimate = algorithm.estimate(CostInputs(spec));
  const double busy = estimate.messages * costs.link.overhead + estimate.bytes / costs.link.bytes_per_second +
                      estimate.reduced / costs.reduce_bytes_per_second;
  return estimate.rounds * costs.link.latency + std::max(1.0, costs.load) * busy;
}

bool fits(const Algorithm& algorithm, const CollectiveSpec& spec) {
  return algorithm.collective == spec.collective && (algorithm.uneven || spec.counts.empty());
}

const Algorithm* choose(const CollectiveSpec& spec) {
  if (spec.algorithm != nullptr && fits(*spec.algorithm, spec)) return spec.algorithm;
  const Algorithm* best = nullptr;
  double least = 0;
  for (const Algorithm& algorithm : algorithms(spec.collective)) {
    if (!fits(algorithm, spec)) continue;
    const double seconds = predict(spec, algorithm);
    if (best != nullptr && seconds >= least) continue;
    best = &algorithm;
    least = seconds;
  }
  return best;
}

}  // namespace muster
