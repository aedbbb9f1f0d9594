#pragma once

#include <span>
#include <string>
#include <string_view>

#include "muster/collective/schedule/schedule.h"

namespace muster {

// Every algorithm is a pure function from a problem to one rank's schedule; all work at any rank count and root, and in
// place. n is the rank count, S the bytes of the whole tensor.

/// Ring reduce-scatter, then ring all-gather, in chunks (Patarasuk and Yuan 2009): 2 (n - 1) / n of the bytes each way.
Schedule ring_all_reduce(const CollectiveSpec& spec);
/// Whole buffers between partners at doubling distances; the ranks beyond a power of two fold in first (Rabenseifner
/// 2004, section 3).
Schedule recursive_doubling_all_reduce(const CollectiveSpec& spec);
/// Reduce-scatter by recursive halving, all-gather by recursive doubling, folding as above (Rabenseifner 2004).
Schedule halving_all_reduce(const CollectiveSpec& spec);
/// Up and down two binary trees that carry half of the bytes each, in chunks; who forwards in one is a leaf of the
/// other (Sanders, Speck and Traeff 2009).
Schedule double_tree_all_reduce(const CollectiveSpec& spec);

/// In chunks: a rank passes on what it has while the rest is still coming.
Schedule binomial_broadcast(const CollectiveSpec& spec);
/// In chunks from rank to rank: nobody sends more than S.
Schedule chain_broadcast(const CollectiveSpec& spec);
/// In chunks down two binary trees (Sanders, Speck and Traeff 2009).
Schedule double_tree_broadcast(const CollectiveSpec& spec);

/// Up a binomial tree, in chunks.
Schedule binomial_reduce(const CollectiveSpec& spec);
/// Ring reduce-scatter, then everybody's share to the root.
Schedule ring_reduce(const CollectiveSpec& spec);

/// Down a binomial tree, each rank passing on the blocks of those below it.
Schedule binomial_scatter(const CollectiveSpec& spec);
/// The root to everybody.
Schedule direct_scatter(const CollectiveSpec& spec);
/// Up a binomial tree.
Schedule binomial_gather(const CollectiveSpec& spec);
/// Everybody to the root.
Schedule direct_gather(const CollectiveSpec& spec);

/// In n - 1 steps around the ring.
Schedule ring_all_gather(const CollectiveSpec& spec);
/// Bruck et al. 1997: ceil(log2 n) rounds at any rank count. Blocks are received where they belong, without the final
/// rotation of the paper.
Schedule bruck_all_gather(const CollectiveSpec& spec);
/// Parallel aggregated trees (Jeaugey 2025): every block down a binomial tree of its own, far ranks first, so that
/// little travels far; log2 n hops and n - 1 messages.
Schedule pat_all_gather(const CollectiveSpec& spec);

/// In n - 1 steps around the ring, with scratch for some chunks only.
Schedule ring_reduce_scatter(const CollectiveSpec& spec);
/// Recursive halving; the ranks beyond a power of two fold in first (Rabenseifner 2004).
Schedule halving_reduce_scatter(const CollectiveSpec& spec);
/// pat_all_gather backwards: every block up a tree of its own, with scratch for log2 n blocks.
Schedule pat_reduce_scatter(const CollectiveSpec& spec);

/// Every pair exchanges its blocks, at most a few at a time.
Schedule pairwise_all_to_all(const CollectiveSpec& spec);
/// Bruck et al. 1997: ceil(log2 n) rounds of half of the blocks each; equal blocks only.
Schedule bruck_all_to_all(const CollectiveSpec& spec);

/// Dissemination barrier (Hensgen et al. 1988): ceil(log2 n) rounds of one byte.
Schedule dissemination_barrier(const CollectiveSpec& spec);

struct Estimate;
struct CostInputs;

struct Algorithm {
  Collective collective;
  const char* name;  ///< as MUSTER_ALGO and `muster explain` take it: "ring"
  Schedule (*schedule)(const CollectiveSpec&);
  Estimate (*estimate)(const CostInputs&);  ///< cost.h
  bool uneven = true;                       ///< also for blocks that differ
};

/// All algorithms, those of one collective side by side.
std::span<const Algorithm> algorithms();
std::span<const Algorithm> algorithms(Collective collective);
/// The algorithm of this name; nullptr when there is none.
const Algorithm* find_algorithm(Collective collective, std::string_view name);
/// "recursive_doubling, halving_doubling, double_tree, ring".
std::string algorithm_names(Collective collective);

/// Whether the algorithm can do the problem.
bool fits(const Algorithm& algorithm, const CollectiveSpec& spec);
/// The given algorithm where it fits, else the fastest by predict(). nullptr for a collective that has none.
const Algorithm* choose(const CollectiveSpec& spec);

}  // namespace muster
