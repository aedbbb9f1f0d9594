#include "muster/group/engine/schedule_runner.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace muster {
namespace {

/// Plans that are kept. A training step repeats fewer shapes than this; more would only make the search longer.
constexpr size_t kMaxPlans = 64;
/// A plan of more steps is not kept beside others: the memory would be a surprise.
constexpr size_t kMostSteps = 1 << 18;

/// What a plan depends on, of an operation or of the problem that it was planned for.
using Shape =
    std::tuple<Collective, Rank, int, size_t, size_t, Rank, const std::vector<size_t>&, const std::vector<size_t>&>;

Shape shape(const Operation& operation, Rank self, int size) {
  const Call& call = operation.call;
  return {call.collective,         self, size, call.count, size_of(call.dtype), call.root, operation.counts,
          operation.receive_counts};
}

template <class P>
auto shape(P& problem) {
  return std::tie(problem.collective, problem.rank, problem.size, problem.count, problem.element_bytes, problem.root,
                  problem.counts, problem.receive_counts);
}

}  // namespace

void ScheduleRunner::choose_by(const Tuning& tuning, std::string kind, int ranks_per_host) {
  tuning_ = tuning;
  kind_ = std::move(kind);
  ranks_per_host_ = ranks_per_host;
}

Result<const Schedule*> ScheduleRunner::plan(const Operation& operation, Rank self, int size) {
  ++calls_;
  const Shape wanted = shape(operation, self, size);
  for (last_ = 0; last_ < plans_.size(); ++last_) {
    if (shape(std::as_const(plans_[last_].problem)) != wanted) continue;
    plans_[last_].used = calls_;
    return &plans_[last_].prepared.schedule();
  }
  CollectiveSpec problem;
  shape(problem) = wanted;
  tuning_.apply(problem, kind_, ranks_per_host_);
  MUSTER_ASSIGN(Schedule schedule, muster::plan(problem));
  keep({std::move(problem), PreparedSchedule(std::move(schedule)), calls_});
  return &plans_[last_].prepared.schedule();
}

void ScheduleRunner::follow(Schedule schedule) {
  CollectiveSpec nobodys;
  nobodys.size = 0;
  keep({std::move(nobodys), PreparedSchedule(std::move(schedule)), ++calls_});
}

/// Behind the others, or in the place of the one that was not used for longest.
void ScheduleRunner::keep(Plan plan) {
  size_t steps = 0;
  for (const Plan& each : plans_) steps += each.prepared.schedule().steps.size();
  if (plans_.empty() || (plans_.size() < kMaxPlans && steps < kMostSteps)) {
    last_ = plans_.size();
    plans_.push_back(std::move(plan));
    return;
  }
  const auto oldest =
      std::min_element(plans_.begin(), plans_.end(), [](const Plan& a, const Plan& b) { return a.used < b.used; });
  last_ = static_cast<size_t>(oldest - plans_.begin());
  *oldest = std::move(plan);
}

void ScheduleRunner::begin(const Operation& operation, std::span<Link* const> links) {
  PreparedSchedule& prepared = plans_[last_].prepared;
  if (scratch_.size() < prepared.schedule().scratch_bytes) scratch_.resize(prepared.schedule().scratch_bytes);
  links_ = links;
  outcome_.reset();
  prepared.start(
      links, Buffers{operation.input, operation.output, operation.call.op}, scratch_,
      [this](Result<> result) { outcome_ = std::move(result); }, &operation.said());
}

std::vector<Rank> ScheduleRunner::waiting_for() const {
  std::vector<Rank> ranks;
  for (const Rank rank : plans_[last_].prepared.waiting_for()) ranks.push_back(links_[rank]->peer().rank);
  return ranks;
}

}  // namespace muster
