#include "muster/collective/algorithms/algorithms.h"

#include <algorithm>

#include "muster/collective/cost/cost.h"

namespace muster {
namespace {

using E = const CostInputs&;

// With chunks, each level of a tree or link of a chain takes the time of one chunk before the next one begins. From
// then on, all of them are busy with the other chunks.
double first_chunk(E e, double parts = 1) { return std::min(e.chunk, e.bytes / parts); }
double behind(E e, double parts = 1) { return e.bytes - parts * first_chunk(e, parts); }
double around_the_ring(E e) { return (e.ranks - 1) * e.chunks(e.bytes / e.ranks); }

// Messages, bytes and combined bytes are those of the busiest rank. Sent and received ones are added up.
constexpr Algorithm kAlgorithms[] = {
    {Collective::kAllReduce, "recursive_doubling", recursive_doubling_all_reduce,
     [](E e) {
       return Estimate{e.halvings + 2 * e.folds, 2 * e.halvings + 4 * e.folds, 2 * e.bytes * (e.halvings + 2 * e.folds),
                       e.bytes * (e.halvings + e.folds)};
     }},
    {Collective::kAllReduce, "halving_doubling", halving_all_reduce,
     [](E e) {
       const double halved = e.bytes * (1 - 1 / e.core) + e.bytes * e.folds;
       return Estimate{2 * (e.halvings + e.folds), 4 * (e.halvings + e.folds) + halved / e.chunk, 4 * halved, halved};
     }},
    {Collective::kAllReduce, "double_tree", double_tree_all_reduce,
     [](E e) {
       const double first = first_chunk(e, 2);
       return Estimate{2 * e.doublings, 6 * e.doublings + 8 * (e.chunks(e.bytes / 2) - 1),
                       6 * e.doublings * first + 4 * behind(e, 2), 2 * e.doublings * first + behind(e, 2)};
     }},
    {Collective::kAllReduce, "ring", ring_all_reduce,
     [](E e) {
       return Estimate{2 * (e.ranks - 1), 4 * around_the_ring(e), 4 * e.foreign(), e.foreign()};
     }},

    {Collective::kBroadcast, "binomial", binomial_broadcast,
     [](E e) {
       return Estimate{e.doublings, e.doublings * (e.chunks(e.bytes) + 1), e.doublings * (e.bytes + first_chunk(e)), 0};
     }},
    {Collective::kBroadcast, "double_tree", double_tree_broadcast,
     [](E e) {
       return Estimate{e.doublings, 3 * e.doublings + 4 * (e.chunks(e.bytes / 2) - 1),
                       3 * e.doublings * first_chunk(e, 2) + 2 * behind(e, 2), 0};
     }},
    {Collective::kBroadcast, "chain", chain_broadcast,
     [](E e) {
       return Estimate{e.ranks - 1, 2 * (e.ranks - 2 + e.chunks(e.bytes)),
                       2 * ((e.ranks - 1) * first_chunk(e) + behind(e)), 0};
     }},

    {Collective::kAllGather, "bruck", bruck_all_gather,
     [](E e) {
       return Estimate{e.doublings, 3 * e.doublings, 2 * e.foreign(), 0};
     }},
    {Collective::kAllGather, "pat", pat_all_gather,
     [](E e) {
       return Estimate{e.doublings, 2 * around_the_ring(e), 2 * e.foreign(), 0};
     }},
    {Collective::kAllGather, "ring", ring_all_gather,
     [](E e) {
       return Estimate{e.ranks - 1, 2 * around_the_ring(e), 2 * e.foreign(), 0};
     }},

    {Collective::kBarrier, "dissemination", dissemination_barrier,
     [](E e) {
       return Estimate{e.doublings, 2 * e.doublings, 0, 0};
     }},

    {Collective::kReduce, "binomial", binomial_reduce,
     [](E e) {
       return Estimate{e.doublings, e.doublings * (e.chunks(e.bytes) + 1), e.doublings * (e.bytes + first_chunk(e)),
                       e.doublings * e.bytes};
     }},
    {Collective::kReduce, "ring", ring_reduce,
     [](E e) {
       return Estimate{e.ranks, 3 * around_the_ring(e), 3 * e.foreign(), e.foreign()};
     }},

    {Collective::kScatter, "binomial", binomial_scatter,
     [](E e) {
       return Estimate{e.doublings, 3 * e.doublings, 2 * e.foreign(), 0};
     }},
    {Collective::kScatter, "direct", direct_scatter,
     [](E e) {
       return Estimate{1, e.ranks, e.bytes, 0};
     }},

    {Collective::kGather, "binomial", binomial_gather,
     [](E e) {
       return Estimate{e.doublings, 3 * e.doublings, 2 * e.foreign(), 0};
     }},
    {Collective::kGather, "direct", direct_gather,
     [](E e) {
       return Estimate{1, e.ranks, e.bytes, 0};
     }},

    {Collective::kReduceScatter, "halving", halving_reduce_scatter,
     [](E e) {
       const double halved = e.bytes * (1 - 1 / e.core) + e.bytes * e.folds;
       return Estimate{e.halvings + 2 * e.folds, 2 * e.halvings + 4 * e.folds + halved / e.chunk, 2 * halved, halved};
     }},
    {Collective::kReduceScatter, "pat", pat_reduce_scatter,
     [](E e) {
       return Estimate{e.doublings, 2 * around_the_ring(e), 2 * e.foreign(), e.foreign()};
     }},
    {Collective::kReduceScatter, "ring", ring_reduce_scatter,
     [](E e) {
       return Estimate{e.ranks - 1, 2 * around_the_ring(e), 2 * e.foreign(), e.foreign()};
     }},

    {Collective::kAllToAll, "bruck", bruck_all_to_all,
     [](E e) {
       return Estimate{e.doublings, 2 * e.doublings, e.bytes * e.doublings, e.bytes * (2 + e.doublings)};
     },
     false},
    {Collective::kAllToAll, "pairwise", pairwise_all_to_all,
     [](E e) {
       return Estimate{1 + e.ranks / 8, 2 * (e.ranks - 1), 2 * e.foreign(), 0};
     }},
};

}  // namespace

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
