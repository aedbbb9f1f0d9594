#include "muster/collective/schedule/dependency_graph.h"

#include <map>
#include <utility>

#include "muster/base/check.h"

namespace muster {
namespace {

template <class Visit>
void visit_dependencies(std::span<const Step> steps, Visit&& visit) {
  for (uint32_t step = 0; step < steps.size(); ++step) {
    for (const uint32_t other : {steps[step].after, steps[step].and_after}) {
      if (other != Step::kNone) visit(step, other);
    }
  }
}

}  // namespace

DependencyGraph::DependencyGraph(std::span<const Step> steps) : nodes_(steps.size() + 1) {
  visit_dependencies(steps, [&](uint32_t step, uint32_t other) {
    MUSTER_CHECK(other < step, "a step depends on a later one");
    ++nodes_[step].dependencies;
    ++nodes_[other + 1].successors;
  });
  for (size_t i = 1; i < nodes_.size(); ++i) nodes_[i].successors += nodes_[i - 1].successors;
  successors_.resize(nodes_.back().successors);
  std::vector<uint32_t> filled(steps.size());
  visit_dependencies(
      steps, [&](uint32_t step, uint32_t other) { successors_[nodes_[other].successors + filled[other]++] = step; });
  std::map<std::pair<Rank, bool>, uint32_t> last;  // by peer and direction
  for (uint32_t step = 0; step < steps.size(); ++step) {
    if (steps[step].peer == kNoRank) continue;
    const auto [previous, first] = last.try_emplace({steps[step].peer, steps[step].kind == Step::Kind::kSend}, step);
    nodes_[step].first_with_peer = first;
    if (first) continue;
    nodes_[std::exchange(previous->second, step)].next_with_peer = step;
    ++nodes_[step].dependencies;
  }
}

}  // namespace muster
