#include "muster/collective/algorithms/algorithms.h"

#include <algorithm>

#include "muster/base/check.h"
#include "muster/collective/cost/cost.h"
#include "muster/collective/schedule/blocks.h"

namespace muster {
namespace {

using E = const CostInputs&;

// With chunks, each level of a tree or link of a chain takes the time of one chunk before the next one begins. From
// then on, all of them are busy with the other chunks.
double first_chunk(E e, double parts = 1) { return std::min(e.chunk, e.bytes / parts); }
double behind(E e, double parts = 1) { return e.bytes - parts * first_chunk(e, parts); }
double around_the_ring(E e) { return (e.ranks - 1) * e.chunks(e.bytes / e.ranks); }

// Estimates. Messages, bytes and combined bytes are those of the busiest rank. Sent and received ones are added up.
Estimate doubling_cost(E e) {
  const double rounds = e.halvings + 2 * e.folds;
  return {rounds, 2 * rounds, 2 * e.bytes * rounds, e.bytes * (e.halvings + e.folds)};
}
double halved_bytes(E e) { return e.bytes * (1 - 1 / e.core) + e.bytes * e.folds; }
Estimate halving_all_reduce_cost(E e) {
  const double halved = halved_bytes(e);
  return {2 * (e.halvings + e.folds), 4 * (e.halvings + e.folds) + halved / e.chunk, 4 * halved, halved};
}
Estimate halving_reduce_scatter_cost(E e) {
  const double halved = halved_bytes(e), rounds = e.halvings + 2 * e.folds;
  return {rounds, 2 * rounds + halved / e.chunk, 2 * halved, halved};
}
Estimate double_tree_all_reduce_cost(E e) {
  const double first = first_chunk(e, 2);
  return {2 * e.doublings, 6 * e.doublings + 8 * (e.chunks(e.bytes / 2) - 1),
          6 * e.doublings * first + 4 * behind(e, 2), 2 * e.doublings * first + behind(e, 2)};
}
Estimate double_tree_broadcast_cost(E e) {
  return {e.doublings, 3 * e.doublings + 4 * (e.chunks(e.bytes / 2) - 1),
          3 * e.doublings * first_chunk(e, 2) + 2 * behind(e, 2), 0};
}
Estimate chain_cost(E e) {
  const double hops = e.ranks - 1;
  return {hops, 2 * (hops - 1 + e.chunks(e.bytes)), 2 * (hops * first_chunk(e) + behind(e)), 0};
}
Estimate binomial_broadcast_cost(E e) {
  return {e.doublings, e.doublings * (e.chunks(e.bytes) + 1), e.doublings * (e.bytes + first_chunk(e)), 0};
}
Estimate binomial_reduce_cost(E e) {
  Estimate estimate = binomial_broadcast_cost(e);
  estimate.reduced = e.doublings * e.bytes;
  return estimate;
}
Estimate blocks_by_doubling_cost(E e) { return {e.doublings, 3 * e.doublings, 2 * e.foreign(), 0}; }
Estimate direct_cost(E e) { return {1, e.ranks, e.bytes, 0}; }
Estimate ring_all_reduce_cost(E e) { return {2 * (e.ranks - 1), 4 * around_the_ring(e), 4 * e.foreign(), e.foreign()}; }
Estimate ring_reduce_cost(E e) { return {e.ranks, 3 * around_the_ring(e), 3 * e.foreign(), e.foreign()}; }
Estimate ring_all_gather_cost(E e) { return {e.ranks - 1, 2 * around_the_ring(e), 2 * e.foreign(), 0}; }
Estimate ring_reduce_scatter_cost(E e) { return {e.ranks - 1, 2 * around_the_ring(e), 2 * e.foreign(), e.foreign()}; }
Estimate pat_all_gather_cost(E e) { return {e.doublings, 2 * around_the_ring(e), 2 * e.foreign(), 0}; }
Estimate pat_reduce_scatter_cost(E e) { return {e.doublings, 2 * around_the_ring(e), 2 * e.foreign(), e.foreign()}; }
Estimate dissemination_cost(E e) { return {e.doublings, 2 * e.doublings, 0, 0}; }
Estimate bruck_all_to_all_cost(E e) {
  return {e.doublings, 2 * e.doublings, e.bytes * e.doublings, e.bytes * (2 + e.doublings)};
}
Estimate pairwise_cost(E e) { return {1 + e.ranks / 8, 2 * (e.ranks - 1), 2 * e.foreign(), 0}; }

constexpr Algorithm kAlgorithms[] = {
    {Collective::kAllReduce, "recursive_doubling", recursive_doubling_all_reduce, doubling_cost},
    {Collective::kAllReduce, "halving_doubling", halving_all_reduce, halving_all_reduce_cost},
    {Collective::kAllReduce, "double_tree", double_tree_all_reduce, double_tree_all_reduce_cost},
    {Collective::kAllReduce, "ring", ring_all_reduce, ring_all_reduce_cost},

    {Collective::kBroadcast, "binomial", binomial_broadcast, binomial_broadcast_cost},
    {Collective::kBroadcast, "double_tree", double_tree_broadcast, double_tree_broadcast_cost},
    {Collective::kBroadcast, "chain", chain_broadcast, chain_cost},

    {Collective::kAllGather, "bruck", bruck_all_gather, blocks_by_doubling_cost},
    {Collective::kAllGather, "pat", pat_all_gather, pat_all_gather_cost},
    {Collective::kAllGather, "ring", ring_all_gather, ring_all_gather_cost},

    {Collective::kBarrier, "dissemination", dissemination_barrier, dissemination_cost},

    {Collective::kReduce, "binomial", binomial_reduce, binomial_reduce_cost},
    {Collective::kReduce, "ring", ring_reduce, ring_reduce_cost},

    {Collective::kScatter, "binomial", binomial_scatter, blocks_by_doubling_cost},
    {Collective::kScatter, "direct", direct_scatter, direct_cost},

    {Collective::kGather, "binomial", binomial_gather, blocks_by_doubling_cost},
    {Collective::kGather, "direct", direct_gather, direct_cost},

    {Collective::kReduceScatter, "halving", halving_reduce_scatter, halving_reduce_scatter_cost},
    {Collective::kReduceScatter, "pat", pat_reduce_scatter, pat_reduce_scatter_cost},
    {Collective::kReduceScatter, "ring", ring_reduce_scatter, ring_reduce_scatter_cost},

    {Collective::kAllToAll, "bruck", bruck_all_to_all, bruck_all_to_all_cost, false},
    {Collective::kAllToAll, "pairwise", pairwise_all_to_all, pairwise_cost},
};

}  // namespace

Schedule Algorithm::schedule(const CollectiveSpec& spec) const {
  MUSTER_CHECK(spec.size > 0 && spec.rank >= 0 && spec.rank < spec.size, "a rank lies in [0, size)");
  MUSTER_CHECK(spec.root >= 0 && spec.root < spec.size, "the root lies in [0, size)");
  MUSTER_CHECK(spec.element_bytes > 0, "elements have bytes");
  const auto of_ranks = [&](const std::vector<size_t>& counts) {
    return counts.empty() || counts.size() == static_cast<size_t>(spec.size);
  };
  MUSTER_CHECK(of_ranks(spec.counts) && of_ranks(spec.receive_counts), "there is one count for each rank");
  MUSTER_CHECK(uneven || spec.counts.empty(), "the blocks of this algorithm are equal");
  if (spec.size > 1) return schedule_of_many(spec);
  if (collective == Collective::kBarrier) return {};
  const size_t bytes = Blocks::of_ranks(spec).total();
  ScheduleBuilder builder;
  builder.copy(input(0, bytes), output(0, bytes));
  return builder.take();
}

std::span<const Algorithm> algorithms() { return kAlgorithms; }

std::span<const Algorithm> algorithms(Collective collective) {
  const auto [first, last] =
      std::ranges::equal_range(kAlgorithms, collective, {}, [](const Algorithm& entry) { return entry.collective; });
  return {first, last};
}

const Algorithm* find_algorithm(Collective collective, std::string_view name) {
  for (const Algorithm& algorithm : algorithms(collective)) {
    if (name == algorithm.name) return &algorithm;
  }
  return nullptr;
}

std::string algorithm_names(Collective collective) {
  std::string names;
  for (const Algorithm& algorithm : algorithms(collective)) {
    names += (names.empty() ? "" : ", ") + std::string(algorithm.name);
  }
  return names;
}

}  // namespace muster
