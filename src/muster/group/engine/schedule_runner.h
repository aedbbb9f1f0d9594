#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/collective/cost/tuning.h"
#include "muster/collective/operation.h"
#include "muster/collective/schedule/execution.h"
#include "muster/collective/schedule/schedule.h"

namespace muster {

/// Operations over links, one at a time: plans them, keeps the plans of the calls that repeat, and owns the scratch
/// memory. Driven by the links' loop.
class ScheduleRunner {
 public:
  /// How plans are chosen: for links of a kind ("tcp", "unix", "shm"), with so many ranks on a host. Alike at all
  /// ranks; to be told before the first call.
  void choose_by(const Tuning& tuning, std::string kind, int ranks_per_host);

  /// The schedule of an operation between `size` ranks of which this one is `self`. Valid until the next call. Not to
  /// be called while one is under way.
  Result<const Schedule*> plan(const Operation& operation, Rank self, int size);
  /// Plans what no algorithm of a collective does.
  void follow(Schedule schedule);
  /// The ranks that the last planned schedule exchanges bytes with.
  const std::vector<Rank>& peers() const { return plans_[last_].prepared.peers(); }

  /// Starts what was planned last. `links[r]` is the link to rank r; they, and the operation with its memory, must live
  /// until it is over, or until the links are closed. Every peer's first bytes say what it runs: kMismatch if that is
  /// something else.
  void begin(const Operation& operation, std::span<Link* const> links);
  /// Set once it is over.
  const std::optional<Result<>>& outcome() const { return outcome_; }
  /// The ranks, as their links name them, that it waits for.
  std::vector<Rank> waiting_for() const;

 private:
  struct Plan {
    CollectiveSpec problem;
    PreparedSchedule prepared;
    uint64_t used;  ///< when, counted in calls
  };
  void keep(Plan plan);

  Tuning tuning_;
  std::string kind_ = "tcp";
  int ranks_per_host_ = 1;
  std::vector<Plan> plans_;
  size_t last_ = 0;
  uint64_t calls_ = 0;
  Bytes scratch_;
  std::span<Link* const> links_;
  std::optional<Result<>> outcome_;
};

}  // namespace muster
