#pragma once

#include <cstddef>

namespace muster::load {

/// Whose addresses a worker reads.
enum class Exchange {
  kFullMesh,  ///< everybody's, its own too, as Gloo does
  kDoubling,  ///< of ranks at distances of 1, 2, 4, ... both ways
  /// Of both neighbours on a ring of all ranks; a node's first rank also of the parent and the children of its node, in
  /// a binary tree of the nodes' first ranks.
  kRingAndTree,
};

struct Peers {
  size_t workers = 8;
  size_t workers_per_node = 8;
  Exchange exchange = Exchange::kDoubling;

  size_t nodes() const { return (workers + workers_per_node - 1) / workers_per_node; }
  size_t count(size_t rank) const;
  /// The rank of a worker's peer number 0, 1, ... count() - 1.
  size_t peer(size_t rank, size_t number) const;
};

}  // namespace muster::load
