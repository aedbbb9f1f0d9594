#include "muster/group/engine/schedule_runner.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace muster {
namespace {

/// Maximum number of cached plans. A training step repeats fewer shapes than this. The cache is searched linearly, so a
/// larger one would be slower.
constexpr size_t kMaxPlans = 64;
/// No plan is added once the cached plans have this many steps in all. This limits their memory.
constexpr size_t kMaxCachedSteps = 1 << 18;

/// Everything that a plan depends on. It is read from an operation, or from the spec of a cached plan.
using Shape =
    std::tuple<Collective, Rank, int, size_t, size_t, Rank, const std::vector<size_t>&, const std::vector<size_t>&>;

Shape shape(const Operation& operation, Rank self, int size) {
  const Call& call = operation.call;
  return {call.collective,         self, size, call.count, size_of(call.dtype), call.root, operation.counts,
          operation.receive_counts};
}

template <class Spec>
auto shape(Spec& spec) {
  return std::tie(spec.collective, spec.rank, spec.size, spec.count, spec.element_bytes, spec.root, spec.counts,
                  spec.receive_counts);
}

}  // namespace

Result<const Schedule*> ScheduleRunner::plan(const Operation& operation, Rank self, int size) {
  ++calls_;
  const Shape wanted = shape(operation, self, size);
  for (current_ = 0; current_ < plans_.size(); ++current_) {
    if (shape(std::as_const(plans_[current_].spec)) != wanted) continue;
    plans_[current_].last_used = calls_;
    return &plans_[current_].prepared.schedule();
  }
  CollectiveSpec spec;
  shape(spec) = wanted;
  tuning_.apply(spec, kind_, ranks_per_host_);
  MUSTER_ASSIGN(Schedule schedule, muster::plan(spec));
  cache({std::move(spec), PreparedSchedule(std::move(schedule)), calls_});
  return &plans_[current_].prepared.schedule();
}

void ScheduleRunner::follow(Schedule schedule) {
  CollectiveSpec unmatched;  // a size of 0 matches no operation
  unmatched.size = 0;
  cache({std::move(unmatched), PreparedSchedule(std::move(schedule)), ++calls_});
}

/// Adds the plan. If the cache is full, replaces the least recently used plan.
void ScheduleRunner::cache(Plan plan) {
  size_t steps = 0;
  for (const Plan& each : plans_) steps += each.prepared.schedule().steps.size();
  if (plans_.empty() || (plans_.size() < kMaxPlans && steps < kMaxCachedSteps)) {
    current_ = plans_.size();
    plans_.push_back(std::move(plan));
    return;
  }
  const auto oldest = std::min_element(plans_.begin(), plans_.end(),
                                       [](const Plan& a, const Plan& b) { return a.last_used < b.last_used; });
  current_ = static_cast<size_t>(oldest - plans_.begin());
  *oldest = std::move(plan);
}

void ScheduleRunner::begin(const Operation& operation, std::span<Link* const> links) {
  PreparedSchedule& prepared = plans_[current_].prepared;
  if (scratch_.size() < prepared.schedule().scratch_bytes) scratch_.resize(prepared.schedule().scratch_bytes);
  links_ = links;
  outcome_.reset();
  prepared.start(
      links, Buffers{operation.input, operation.output, operation.call.op}, scratch_,
      [this](Result<> result) { outcome_ = std::move(result); }, &operation.reported_call());
}

std::vector<Rank> ScheduleRunner::waiting_for() const {
  std::vector<Rank> ranks;
  for (const Rank rank : plans_[current_].prepared.waiting_for()) ranks.push_back(links_[rank]->peer().rank);
  return ranks;
}

}  // namespace muster
