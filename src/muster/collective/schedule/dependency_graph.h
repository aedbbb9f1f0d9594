#pragma once

#include <span>
#include <vector>

#include "muster/collective/schedule/schedule.h"

namespace muster {

/// The dependencies between the steps of one rank's schedule, and how many of them are open in the current run.
///
/// A step waits for the end of the steps that its `after` and `and_after` name. It also waits for the start of the
/// previous step with the same peer in the same direction, because a link carries bytes in order. A graph allocates
/// memory when it is made, but not in a run.
class DependencyGraph {
 public:
  explicit DependencyGraph(std::span<const Step> steps);

  /// True if no earlier step exchanges bytes with the same peer in the same direction.
  bool is_first_with_peer(uint32_t step) const { return nodes_[step].first_with_peer; }
  /// True if the step has started and has not ended.
  bool is_running(uint32_t step) const { return nodes_[step].running; }

  /// Opens all dependencies, then calls `ready(step)` for each step that has none.
  template <class Ready>
  void begin_run(Ready&& ready) {
    for (Node& node : nodes_) {
      node.open = node.dependencies;
      node.running = false;
    }
    for (uint32_t step = 0; step + 1 < nodes_.size(); ++step) {
      if (nodes_[step].dependencies == 0) ready(step);
    }
  }
  /// The step has started. Calls `ready(next)` if another step waited only for this start.
  template <class Ready>
  void on_started(uint32_t step, Ready&& ready) {
    nodes_[step].running = true;
    if (const uint32_t next = nodes_[step].next_with_peer; next != Step::kNone) release(next, ready);
  }
  /// The step has ended. Calls `ready(next)` for each step that waited only for this end, in list order.
  template <class Ready>
  void on_ended(uint32_t step, Ready&& ready) {
    nodes_[step].running = false;
    for (uint32_t i = nodes_[step].successors; i != nodes_[step + 1].successors; ++i) release(successors_[i], ready);
  }

 private:
  struct Node {
    uint32_t successors = 0;  ///< index of the first one; the next node's index ends them
    uint32_t next_with_peer = Step::kNone;
    uint8_t dependencies = 0;
    uint8_t open = 0;
    bool first_with_peer = false;
    bool running = false;
  };

  template <class Ready>
  void release(uint32_t step, Ready&& ready) {
    if (--nodes_[step].open == 0) ready(step);
  }

  std::vector<Node> nodes_;  ///< by step, and one more node that ends the last step's successors
  std::vector<uint32_t> successors_;
};

}  // namespace muster
