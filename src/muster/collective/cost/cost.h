#pragma once

#include "muster/collective/algorithms/algorithms.h"

namespace muster {

/// The quantities that an algorithm's cost depends on.
struct CostInputs {
  explicit CostInputs(const CollectiveSpec& spec);

  double ranks;      ///< n
  double doublings;  ///< ceil(log2 n)
  double core;       ///< the largest power of two up to n
  double halvings;   ///< log2 of `core`
  double folds;      ///< 1 if n is not a power of two, else 0
  double bytes;      ///< S: bytes of the tensor, or of all ranks' blocks together
  double chunk;      ///< bytes of a chunk

  /// The number of chunks of `of_bytes` bytes, at least one.
  double chunks(double of_bytes) const;
  /// The part of S that belongs to the other ranks.
  double foreign() const { return bytes * (ranks - 1) / ranks; }
};

/// The cost of the longest path through an algorithm.
struct Estimate {
  double rounds = 0;    ///< latencies in sequence
  double messages = 0;  ///< sends and receives of a rank
  double bytes = 0;     ///< that it sends and receives
  double reduced = 0;   ///< bytes that it combines or copies
};

/// Seconds that the algorithm takes if all ranks begin together. A closed formula, so that the choice of an algorithm
/// is cheap. Equal at all ranks. Tests compare it with evaluate() (evaluation.h).
double predict(const CollectiveSpec& spec, const Algorithm& algorithm);

/// True if the algorithm supports the spec.
bool fits(const Algorithm& algorithm, const CollectiveSpec& spec);
/// The given algorithm if it fits, else the fastest by predict(). nullptr for a collective without algorithms.
const Algorithm* choose(const CollectiveSpec& spec);

}  // namespace muster
