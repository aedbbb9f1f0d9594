#pragma once

#include <span>
#include <string>
#include <string_view>

#include "muster/collective/schedule/schedule.h"

namespace muster {

// Every algorithm is a pure function from a spec to one rank's schedule. All work at any root and any rank count above
// one, and in place. Algorithm::schedule() calls them. n is the rank count, S the size of the whole tensor in bytes.

/// Ring reduce-scatter, then ring all-gather, in chunks (Patarasuk and Yuan 2009). Each rank sends and receives
/// 2 (n - 1) / n of the bytes.
Schedule ring_all_reduce(const CollectiveSpec& spec);
/// Partners at doubling distances exchange whole buffers. The ranks beyond a power of two fold first (folding.h;
/// Rabenseifner 2004, section 3).
Schedule recursive_doubling_all_reduce(const CollectiveSpec& spec);
/// Reduce-scatter by recursive halving, all-gather by recursive doubling, folding as above (Rabenseifner 2004).
Schedule halving_all_reduce(const CollectiveSpec& spec);
/// Sends chunks up and down two binary trees, each of which carries half of the bytes. An inner rank of one tree is a
/// leaf of the other (Sanders, Speck and Traeff 2009).
Schedule double_tree_all_reduce(const CollectiveSpec& spec);

/// Sends chunks down a binomial tree: a rank forwards one chunk while the next one arrives.
Schedule binomial_broadcast(const CollectiveSpec& spec);
/// Sends chunks from rank to rank: no rank sends more than S.
Schedule chain_broadcast(const CollectiveSpec& spec);
/// Sends chunks down two binary trees (Sanders, Speck and Traeff 2009).
Schedule double_tree_broadcast(const CollectiveSpec& spec);

/// Sends partial sums up a binomial tree, in chunks.
Schedule binomial_reduce(const CollectiveSpec& spec);
/// Ring reduce-scatter, then every rank sends its share to the root.
Schedule ring_reduce(const CollectiveSpec& spec);

/// Sends blocks down a binomial tree: each rank forwards the blocks of the ranks below it.
Schedule binomial_scatter(const CollectiveSpec& spec);
/// The root sends every rank its block directly.
Schedule direct_scatter(const CollectiveSpec& spec);
/// Sends blocks up a binomial tree.
Schedule binomial_gather(const CollectiveSpec& spec);
/// Every rank sends its block to the root directly.
Schedule direct_gather(const CollectiveSpec& spec);

/// Sends blocks around the ring in n - 1 steps.
Schedule ring_all_gather(const CollectiveSpec& spec);
/// Bruck et al. 1997: ceil(log2 n) rounds at any rank count. Blocks are received in their final positions, so there is
/// no final rotation as in the paper.
Schedule bruck_all_gather(const CollectiveSpec& spec);
/// Parallel aggregated trees (Jeaugey 2025): every block goes down its own binomial tree, to far ranks first, so that
/// few bytes travel far. log2 n hops and n - 1 messages.
Schedule pat_all_gather(const CollectiveSpec& spec);

/// Sends partial sums around the ring in n - 1 steps, with scratch for some chunks only.
Schedule ring_reduce_scatter(const CollectiveSpec& spec);
/// Recursive halving. The ranks beyond a power of two fold first (Rabenseifner 2004).
Schedule halving_reduce_scatter(const CollectiveSpec& spec);
/// The reverse of pat_all_gather: every block goes up its own tree, with scratch for log2 n blocks.
Schedule pat_reduce_scatter(const CollectiveSpec& spec);

/// Every pair of ranks exchanges its blocks directly, a few pairs at a time.
Schedule pairwise_all_to_all(const CollectiveSpec& spec);
/// Bruck et al. 1997: ceil(log2 n) rounds of half of the blocks each; equal blocks only.
Schedule bruck_all_to_all(const CollectiveSpec& spec);

/// Dissemination barrier (Hensgen et al. 1988): ceil(log2 n) rounds of one byte.
Schedule dissemination_barrier(const CollectiveSpec& spec);

struct Estimate;
struct CostInputs;

struct Algorithm {
  Collective collective;
  const char* name;  ///< as in MUSTER_ALGO and `muster explain`: "ring"
  Schedule (*schedule_of_many)(const CollectiveSpec&);
  Estimate (*estimate)(const CostInputs&);  ///< cost.h
  bool uneven = true;                       ///< supports blocks of different lengths

  /// The schedule for one rank. A single rank copies its input.
  Schedule schedule(const CollectiveSpec& spec) const;
};

/// All algorithms, ordered by collective.
std::span<const Algorithm> algorithms();
std::span<const Algorithm> algorithms(Collective collective);
/// The algorithm of this name; nullptr when there is none.
const Algorithm* find_algorithm(Collective collective, std::string_view name);
/// "recursive_doubling, halving_doubling, double_tree, ring".
std::string algorithm_names(Collective collective);

}  // namespace muster
