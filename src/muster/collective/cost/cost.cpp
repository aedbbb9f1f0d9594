#include "muster/collective/cost/cost.h"

#include <bit>
#include <cmath>
#include <numeric>

#include "muster/collective/schedule/schedule_builder.h"

namespace muster {
namespace {

double total_bytes(const CollectiveSpec& problem) {
  size_t elements = problem.count;
  switch (problem.collective) {
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kScatter:
    case Collective::kGather:
    case Collective::kAllToAll:
      elements = problem.counts.empty() ? problem.count * problem.size
                                        : std::accumulate(problem.counts.begin(), problem.counts.end(), size_t{0});
      break;
    default:
      break;
  }
  return static_cast<double>(elements) * static_cast<double>(problem.element_bytes);
}

}  // namespace

CostInputs::CostInputs(const CollectiveSpec& problem)
    : ranks(problem.size),
      doublings(doubling_rounds(problem.size)),
      core(std::bit_floor(static_cast<unsigned>(problem.size))),
      halvings(std::log2(core)),
      folds(core == ranks ? 0 : 1),
      bytes(total_bytes(problem)),
      chunk(static_cast<double>(chunk_grain(problem))) {}

double CostInputs::chunks(double of_bytes) const { return std::max(1.0, std::ceil(of_bytes / chunk)); }

double predict(const CollectiveSpec& problem, const Algorithm& algorithm) {
  const Network& network = problem.network;
  const Estimate estimate = algorithm.estimate(CostInputs(problem));
  const double busy = estimate.messages * network.overhead + estimate.bytes / network.bytes_per_second +
                      estimate.reduced / network.reduce_bytes_per_second;
  return estimate.rounds * network.latency + std::max(1.0, network.load) * busy;
}

bool fits(const Algorithm& algorithm, const CollectiveSpec& problem) {
  return algorithm.collective == problem.collective && (algorithm.uneven || problem.counts.empty());
}

const Algorithm* choose(const CollectiveSpec& problem) {
  if (problem.algorithm != nullptr && fits(*problem.algorithm, problem)) return problem.algorithm;
  const Algorithm* best = nullptr;
  double least = 0;
  for (const Algorithm& algorithm : algorithms(problem.collective)) {
    if (!fits(algorithm, problem)) continue;
    const double seconds = predict(problem, algorithm);
    if (best != nullptr && seconds >= least) continue;
    best = &algorithm;
    least = seconds;
  }
  return best;
}

}  // namespace muster
