#include "muster/group/passage.h"

#include <algorithm>
#include <set>

namespace muster {
namespace {

/// Plans that are kept. A training step repeats fewer shapes than this; more would only make the search longer.
constexpr size_t kMostPlans = 64;
/// A plan of more steps is not kept beside others: the memory would be a surprise.
constexpr size_t kMostSteps = 1 << 18;

Problem problem_of(const Operation& operation, Rank self, int size) {
  Problem problem;
  problem.collective = operation.call.collective;
  problem.rank = self;
  problem.size = size;
  problem.count = operation.call.count;
  problem.element_bytes = size_of(operation.call.dtype);
  problem.root = operation.call.root;
  problem.counts = operation.counts;
  problem.receive_counts = operation.receive_counts;
  return problem;
}

bool asks_for(const Problem& problem, const Operation& operation, Rank self, int size) {
  return problem.collective == operation.call.collective && problem.rank == self && problem.size == size &&
         problem.count == operation.call.count && problem.element_bytes == size_of(operation.call.dtype) &&
         problem.root == operation.call.root && problem.counts == operation.counts &&
         problem.receive_counts == operation.receive_counts;
}

}  // namespace

Result<const Schedule*> Passage::plan(const Operation& operation, Rank self, int size) {
  ++calls_;
  for (last_ = 0; last_ < plans_.size(); ++last_) {
    if (!asks_for(plans_[last_].problem, operation, self, size)) continue;
    plans_[last_].used = calls_;
    return &plans_[last_].schedule;
  }
  Problem problem = problem_of(operation, self, size);
  MUSTER_ASSIGN(Schedule schedule, muster::plan(problem));
  std::set<Rank> peers;
  for (const Step& step : schedule.steps) {
    if (step.peer != kNoRank) peers.insert(step.peer);
  }
  execution_.reset();  // it may run the plan that has to go
  Plan& plan = room();
  plan = Plan{std::move(problem), std::move(schedule), {peers.begin(), peers.end()}, calls_};
  last_ = static_cast<size_t>(&plan - plans_.data());
  return &plan.schedule;
}

/// Where a new plan goes: behind the others, or in the place of the one that was not used for longest.
Passage::Plan& Passage::room() {
  size_t steps = 0;
  for (const Plan& plan : plans_) steps += plan.schedule.steps.size();
  if (plans_.empty() || (plans_.size() < kMostPlans && steps < kMostSteps)) return plans_.emplace_back();
  return *std::min_element(plans_.begin(), plans_.end(), [](const Plan& a, const Plan& b) { return a.used < b.used; });
}

void Passage::begin(const Operation& operation, std::span<Link* const> links) {
  const Schedule& schedule = plans_[last_].schedule;
  if (scratch_.size() < schedule.scratch_bytes) scratch_.resize(schedule.scratch_bytes);
  links_ = links;
  outcome_.reset();
  execution_.emplace(schedule, links, Buffers{operation.input, operation.output, operation.call.op}, scratch_,
                     [this](Result<> result) { outcome_ = std::move(result); });
  execution_->start();
}

std::vector<Rank> Passage::waiting_for() const {
  std::vector<Rank> ranks;
  for (const Rank rank : execution_->waiting_for()) ranks.push_back(links_[rank]->peer().rank);
  return ranks;
}

}  // namespace muster
