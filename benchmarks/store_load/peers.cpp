#include "peers.h"

#include <algorithm>
#include <bit>

namespace muster::load {
namespace {

// In a binary tree of nodes: its parent, if it has one, and its children.
size_t relatives(size_t node, size_t nodes) {
  const size_t first_child = 2 * node + 1;
  return (node > 0) + (first_child < nodes ? std::min<size_t>(2, nodes - first_child) : 0);
}

size_t relative(size_t node, size_t number) {
  if (node == 0) return number + 1;
  return number == 0 ? (node - 1) / 2 : 2 * node + number;
}

}  // namespace

size_t Peers::count(size_t rank) const {
  switch (exchange) {
    case Exchange::kFullMesh:
      return workers;
    case Exchange::kDoubling:
      return 2 * static_cast<size_t>(std::bit_width(workers - 1));
    case Exchange::kRingAndTree:
      return 2 + (rank % workers_per_node == 0 ? relatives(rank / workers_per_node, nodes()) : 0);
  }
  return 0;
}

size_t Peers::peer(size_t rank, size_t number) const {
  if (exchange == Exchange::kFullMesh) return number;
  if (exchange == Exchange::kRingAndTree && number >= 2) {
    return relative(rank / workers_per_node, number - 2) * workers_per_node;
  }
  const size_t distance = (size_t{1} << (number / 2)) % workers;
  return (number % 2 == 0 ? rank + distance : rank + workers - distance) % workers;
}

}  // namespace muster::load
