#pragma once

#include <string>

#include "muster/collective/cost/tuning.h"
#include "muster/collective/host/host_forms.h"

namespace muster {

/// The collective to plan, of ranks that share one host's memory.
struct HostPlanInputs {
  Collective collective = Collective::kAllReduce;
  size_t bytes = 0;  ///< of the tensor, or of one rank's block
  int ranks = 2;
  int cores = 2;
  size_t element = 4;     ///< bytes
  bool direct = false;    ///< all tensors lie in arenas (shared_tensors.cpp)
  bool in_place = false;  ///< a rank's own block is already in its place
  bool to_root = false;   ///< all_to_all: only blocks for one rank, as Hierarchy uses it for a gather
};

/// The form of a collective (host_collectives.h) in numbers and words, for the rank with the most work.
struct HostPlan {
  std::string form;  ///< "two shots"
  size_t chunk = 0, chunks = 1;
  size_t waits = 1;     ///< in sequence
  size_t awaited = 1;   ///< ranks that each wait waits for
  double copied = 0;    ///< bytes between tensors and slots, including operands
  double combined = 0;  ///< bytes
  double tensors = 0;   ///< bytes of a rank's tensors: large ones are not in caches
  std::string steps;    ///< one line for each step
};

HostPlan plan_on_host(const HostPlanInputs& question);
/// True if a call of so many bytes runs directly on the tensors when all lie in arenas.
bool goes_direct(const HostPlanInputs& question);

/// Predicted seconds. If there are more ranks than cores, the ranks take turns.
double predict(const HostPlan& plan, const HostPlanInputs& question, const MachineCosts& machine);

}  // namespace muster
