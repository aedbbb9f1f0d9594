#pragma once

#include <string>

#include "muster/collective/cost/tuning.h"

namespace muster {

struct Question {
  Collective collective = Collective::kAllReduce;
  size_t bytes = 1 << 20;  ///< of the tensor; for a collective with blocks (is_in_blocks()), of all blocks together
  int ranks = 2;
  int nodes = 1;  ///< the ranks are spread evenly over these
  Rank root = 0;
  Rank rank = 0;          ///< the rank whose steps over links are shown
  size_t max_steps = 20;  ///< the maximum number of steps shown
  /// The kind of the links: "tcp", "unix" or "shm". Empty: as a group chooses, shared memory within a node and TCP
  /// between nodes.
  std::string kind;
};

/// Describes how a group would run the collective on ordinary float32 tensors, with the predicted time. On one node:
/// the form in shared memory and its steps. Over links: the candidate algorithms, the chosen one, and one rank's steps.
/// On several nodes with several ranks each: the parts within a node and between nodes, and their total.
/// kInvalidArgument if a field is out of range.
Result<std::string> explain(const Question& question, const Tuning& tuning);

/// Shows what the algorithm over links does with each slice of a tensor, in rounds of messages: as a Markdown table, or
/// as an SVG picture. "a0" is slice a of rank 0's input. kInvalidArgument for more than 16 ranks.
Result<std::string> explain_table(const Question& question, const Tuning& tuning);
Result<std::string> explain_picture(const Question& question, const Tuning& tuning);

/// The spec of the question's collective over links only. kInvalidArgument if a field is out of range.
Result<CollectiveSpec> spec_over_links(const Question& question, const Tuning& tuning);
/// True if the collective's input or output has one block for each rank.
bool is_in_blocks(Collective collective);

/// The collective of this name ("all_reduce"); kInvalidArgument lists the names.
Result<Collective> collective_named(std::string_view name);

}  // namespace muster
