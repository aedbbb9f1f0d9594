#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/collective/cost/tuning.h"
#include "muster/collective/operation.h"
#include "muster/collective/schedule/execution.h"
#include "muster/collective/schedule/schedule.h"

namespace muster {

/// Runs operations over links, one at a time: plans their schedules, caches the plans of repeated calls, and owns the
/// scratch memory. Not thread-safe: used by the thread that drives the links' loop.
class ScheduleRunner {
 public:
  /// The arguments decide the choice of algorithms, so they must be equal at all ranks: the measured costs, the kind of
  /// the links ("tcp", "unix", "shm") and the ranks per host.
  explicit ScheduleRunner(const Tuning& tuning = {}, std::string kind = "tcp", int ranks_per_host = 1)
      : tuning_(tuning), kind_(std::move(kind)), ranks_per_host_(ranks_per_host) {}

  /// Plans an operation between `size` ranks; this rank is `self`. The result is valid until the next call. Must not be
  /// called while an operation runs.
  Result<const Schedule*> plan(const Operation& operation, Rank self, int size);
  /// Uses a schedule that the caller made.
  void follow(Schedule schedule);
  /// The ranks that the last planned schedule exchanges bytes with.
  const std::vector<Rank>& peers() const { return plans_[current_].prepared.peers(); }

  /// Starts the last planned schedule. `links[r]` is the link to rank r. The links, the operation and its memory must
  /// live until the schedule is done or the links are closed. The first bytes from each peer describe its call; the
  /// outcome is kMismatch if that is another call.
  void begin(const Operation& operation, std::span<Link* const> links);
  /// True if the schedule has begun all its steps.
  bool all_begun() const { return !plans_.empty() && plans_[current_].prepared.all_begun(); }
  /// The result of the schedule; empty while it runs.
  const std::optional<Result<>>& outcome() const { return outcome_; }
  /// The ranks that the running schedule waits for, as ranks of the group.
  std::vector<Rank> waiting_for() const;

 private:
  struct Plan {
    CollectiveSpec spec;
    PreparedSchedule prepared;
    uint64_t last_used;  ///< value of calls_ at the last use
  };
  void cache(Plan plan);

  const Tuning tuning_;
  const std::string kind_;
  const int ranks_per_host_;
  std::vector<Plan> plans_;
  size_t current_ = 0;  ///< index in plans_
  uint64_t calls_ = 0;
  Bytes scratch_;
  std::span<Link* const> links_;
  std::optional<Result<>> outcome_;
};

}  // namespace muster
