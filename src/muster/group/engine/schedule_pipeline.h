#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "muster/group/engine/schedule_runner.h"

namespace muster {

/// Runs operations over links one after the other, and begins the next one while the last transfers of the current one
/// are under way. So a link has bytes to send while its rank waits for other links. Not thread-safe: used by the thread
/// that drives the links' loop.
///
/// The other ranks need not do the same, because the order of the bytes on each link does not change. But a rank that
/// has not begun an operation sees nothing that comes after its bytes, such as the report of a failure.
class SchedulePipeline {
 public:
  /// Arguments as for ScheduleRunner.
  SchedulePipeline(const Tuning& tuning, const std::string& kind, int ranks_per_host)
      : runners_{ScheduleRunner(tuning, kind, ranks_per_host), ScheduleRunner(tuning, kind, ranks_per_host)} {}

  /// Of the current operation.
  ScheduleRunner& runner() { return runners_[turn_]; }
  /// True if this operation has begun early. It is the current one from now on.
  bool resume(const Operation& operation);
  /// True if the current operation has begun all its transfers, and no operation has begun early.
  bool has_room() const { return early_ == 0 && runners_[turn_].all_begun(); }
  /// Begins `next`, between all ranks of the group, unless it must wait for the end of `current`. Both must live until
  /// they are done or the links are closed. `links`: by rank, null where there is none; they must live as long.
  void begin_early(const Operation& next, const Operation& current, Rank self, std::span<Link* const> links);

 private:
  std::array<ScheduleRunner, 2> runners_;
  size_t turn_ = 0;
  uint64_t early_ = 0;       ///< the sequence number of the operation that the other runner has begun; 0: none
  uint64_t considered_ = 0;  ///< the last one that could have begun early
};

}  // namespace muster
