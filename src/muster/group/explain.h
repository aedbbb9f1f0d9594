#pragma once

#include <string>

#include "muster/collective/cost/tuning.h"

namespace muster {

struct Question {
  Collective collective = Collective::kAllReduce;
  size_t bytes = 1 << 20;  ///< of the tensor; of all blocks together where ranks have blocks
  int ranks = 2;
  int nodes = 1;  ///< over which the ranks are spread evenly
  Rank root = 0;
  Rank rank = 0;           ///< whose steps over links are shown
  size_t most_steps = 20;  ///< as many are shown
  /// Of the links: "tcp", "unix", "shm". Empty: what a group takes, shared memory within a node and TCP between nodes.
  std::string kind;
};

/// How a group would run the collective on ordinary tensors of float32, and what that is predicted to take. Within a
/// node: the form in shared memory, and what it does. Over links: the algorithms, the choice, and a rank's steps. On
/// several nodes with several ranks each: the parts within a node and between them, and their sum. kInvalidArgument for
/// a question without sense.
Result<std::string> explain(const Question& question, const Tuning& tuning);

/// What the algorithm over links does with each slice of a tensor, in rounds of messages: a table in Markdown, or a
/// picture as SVG. "a0" is slice a of rank 0's input. kInvalidArgument for more than 16 ranks.
Result<std::string> explain_table(const Question& question, const Tuning& tuning);
Result<std::string> explain_picture(const Question& question, const Tuning& tuning);

/// The question as a problem for links alone; kInvalidArgument for a question without sense.
Result<CollectiveSpec> spec_over_links(const Question& question, const Tuning& tuning);
/// Whether the collective's input or output is a block for each rank.
bool is_in_blocks(Collective collective);

/// The collective of this name ("all_reduce"); kInvalidArgument lists the names.
Result<Collective> collective_named(std::string_view name);

}  // namespace muster
