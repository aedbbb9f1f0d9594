#include "muster/group/passage.h"

#include <algorithm>

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

void Passage::choose_by(const Tuning& tuning, std::string kind, int ranks_per_host) {
  tuning_ = tuning;
  kind_ = std::move(kind);
  ranks_per_host_ = ranks_per_host;
}

Result<const Schedule*> Passage::plan(const Operation& operation, Rank self, int size) {
  ++calls_;
  for (last_ = 0; last_ < plans_.size(); ++last_) {
    if (!asks_for(plans_[last_].problem, operation, self, size)) continue;
    plans_[last_].used = calls_;
    return &plans_[last_].prepared.schedule();
  }
  Problem problem = problem_of(operation, self, size);
  tuning_.apply(problem, kind_, ranks_per_host_);
  MUSTER_ASSIGN(Schedule schedule, muster::plan(problem));
  keep({std::move(problem), PreparedSchedule(std::move(schedule)), calls_});
  return &plans_[last_].prepared.schedule();
}

/// Behind the others, or in the place of the one that was not used for longest.
void Passage::keep(Plan plan) {
  size_t steps = 0;
  for (const Plan& each : plans_) steps += each.prepared.schedule().steps.size();
  if (plans_.empty() || (plans_.size() < kMostPlans && steps < kMostSteps)) {
    last_ = plans_.size();
    plans_.push_back(std::move(plan));
    return;
  }
  const auto oldest =
      std::min_element(plans_.begin(), plans_.end(), [](const Plan& a, const Plan& b) { return a.used < b.used; });
  last_ = static_cast<size_t>(oldest - plans_.begin());
  *oldest = std::move(plan);
}

void Passage::begin(const Operation& operation, std::span<Link* const> links) {
  PreparedSchedule& prepared = plans_[last_].prepared;
  if (scratch_.size() < prepared.schedule().scratch_bytes) scratch_.resize(prepared.schedule().scratch_bytes);
  links_ = links;
  outcome_.reset();
  prepared.start(
      links, Buffers{operation.input, operation.output, operation.call.op}, scratch_,
      [this](Result<> result) { outcome_ = std::move(result); }, &operation.said());
}

std::vector<Rank> Passage::waiting_for() const {
  std::vector<Rank> ranks;
  for (const Rank rank : plans_[last_].prepared.waiting_for()) ranks.push_back(links_[rank]->peer().rank);
  return ranks;
}

}  // namespace muster
