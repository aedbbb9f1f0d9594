#include "muster/collective/algorithms.h"

#include <algorithm>

namespace muster {
namespace {

constexpr Algorithm kAlgorithms[] = {
    {Collective::kAllReduce, "recursive_doubling", recursive_doubling_all_reduce},
    {Collective::kAllReduce, "halving_doubling", halving_all_reduce},
    {Collective::kAllReduce, "double_tree", double_tree_all_reduce},
    {Collective::kAllReduce, "ring", ring_all_reduce},
    {Collective::kBroadcast, "binomial", binomial_broadcast},
    {Collective::kBroadcast, "double_tree", double_tree_broadcast},
    {Collective::kBroadcast, "chain", chain_broadcast},
    {Collective::kAllGather, "bruck", bruck_all_gather},
    {Collective::kAllGather, "pat", pat_all_gather},
    {Collective::kAllGather, "ring", ring_all_gather},
    {Collective::kBarrier, "dissemination", dissemination_barrier},
    {Collective::kReduce, "binomial", binomial_reduce},
    {Collective::kReduce, "ring", ring_reduce},
    {Collective::kScatter, "binomial", binomial_scatter},
    {Collective::kScatter, "direct", direct_scatter},
    {Collective::kGather, "binomial", binomial_gather},
    {Collective::kGather, "direct", direct_gather},
    {Collective::kReduceScatter, "halving", halving_reduce_scatter},
    {Collective::kReduceScatter, "pat", pat_reduce_scatter},
    {Collective::kReduceScatter, "ring", ring_reduce_scatter},
    {Collective::kAllToAll, "bruck", bruck_all_to_all, false},
    {Collective::kAllToAll, "pairwise", pairwise_all_to_all},
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

}  // namespace muster
