#pragma once

#include <string>

#include "muster/collective/cost/tuning.h"
#include "muster/collective/host/host_forms.h"

namespace muster {

/// A collective of ranks that share one host's memory.
struct HostPlanInputs {
  Collective collective = Collective::kAllReduce;
  size_t bytes = 0;  ///< of the tensor, or of one rank's block
  int ranks = 2;
  int cores = 2;
  size_t element = 4;     ///< bytes
  bool direct = false;    ///< all tensors lie in arenas (shared_tensors.cpp)
  bool in_place = false;  ///< a rank's own block lies already where it belongs
  bool to_root = false;   ///< all_to_all: the others' blocks for one rank, as Hierarchy makes a gather of it
};

/// The form of a collective (host_collectives.h) in numbers and words, for the rank with the most work.
struct HostPlan {
  std::string form;  ///< "two shots"
  size_t chunk = 0, chunks = 1;
  size_t waits = 1;     ///< in sequence
  size_t awaited = 1;   ///< ranks in each
  double copied = 0;    ///< bytes between tensors and slots, with those that are read as operands
  double combined = 0;  ///< bytes
  double tensors = 0;   ///< bytes of a rank's tensors: large ones are not in caches
  std::string steps;    ///< one line for each step
};

HostPlan plan_on_host(const HostPlanInputs& question);
/// True if a call of so many bytes runs directly on the tensors when all lie in arenas.
bool goes_direct(const HostPlanInputs& question);

/// Seconds. If there are more ranks than cores, they take turns.
double predict(const HostPlan& plan, const HostPlanInputs& question, const MachineCosts& machine);

}  // namespace muster
