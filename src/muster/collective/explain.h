#pragma once

#include <string>

#include "muster/collective/tuning.h"

namespace muster {

struct Question {
  Collective collective = Collective::kAllReduce;
  size_t bytes = 1 << 20;  ///< of the tensor; of all blocks together where ranks have blocks
  int ranks = 2;
  int nodes = 1;  ///< over which the ranks are spread evenly
  Rank root = 0;
  Rank rank = 0;             ///< whose steps are shown
  size_t most_steps = 20;    ///< as many are shown
  std::string kind = "tcp";  ///< of the links: "tcp", "unix", "shm"
};

/// How the collective would run over links: the algorithms with their predicted times, the choice, and a rank's steps.
/// On several nodes with several ranks each: of the part between the nodes. kInvalidArgument for a question without
/// sense.
Result<std::string> explain(const Question& question, const Tuning& tuning);

/// The collective of this name ("all_reduce"); kInvalidArgument lists the names.
Result<Collective> collective_named(std::string_view name);

}  // namespace muster
