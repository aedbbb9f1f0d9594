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

/// What its form does, as the rank sees it that has the most to do: team_collectives.h in figures and words.
struct HostPlan {
  std::string form;  ///< "two shots"
  size_t chunk = 0, chunks = 1;
  size_t waits = 1;     ///< one after the other
  size_t awaited = 1;   ///< ranks in each
  double copied = 0;    ///< bytes between tensors and slots, those that are read to be combined among them
  double combined = 0;  ///< bytes
  double tensors = 0;   ///< bytes of a rank's tensors: they tell whether caches hold them
  std::string steps;    ///< lines: who writes and reads what
};

HostPlan plan_on_host(const HostPlanInputs& question);
/// Whether a call of so many bytes would be done on the tensors themselves.
bool goes_direct(const HostPlanInputs& question);

/// Seconds. Where ranks outnumber cores, they take turns.
double predict(const HostPlan& plan, const HostPlanInputs& question, const MachineCosts& machine);

}  // namespace muster
