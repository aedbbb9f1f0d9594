#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "muster/group/links/link_table.h"

namespace muster {

/// Keeps the reason why a group's collectives cannot go on: the first failure that a link, a process or a peer reports,
/// or the abort that was requested. Used by the thread that drives the loop, except for request_abort().
class FailureDetector {
 public:
  FailureDetector(Loop& loop, LinkTable& links) : loop_(loop), links_(links) {}

  /// A link to the rank has ended, or its process has died. A rank that left in order is no failure: it may have
  /// finished its part of the current call.
  void on_lost(Rank rank, const Error& why);
  /// Records a failure, unless there is one.
  void fail(Error why);
  /// Makes the current call fail soon. The first request counts. Thread-safe.
  void request_abort(Error why);

  /// The first failure; no call runs after it.
  const std::optional<Error>& failure() const { return failure_; }
  /// Why a rank is gone; null for a rank that is not.
  const Error* lost(Rank rank) const;
  /// Whether there is a failure or a request to abort. Costs one load.
  bool interrupted() const { return failure_.has_value() || abort_requested_.load(std::memory_order_acquire); }
  /// Which one; the failure if there are both.
  std::optional<Error> interruption() const;

  /// Waits until a peer reports a failure, at most kLastReportTime. True: failure() is set.
  bool wait_for_report();
  /// Pings all linked ranks. Returns those that did not answer within kPongTime.
  std::vector<Rank> silent_ranks(const std::vector<Link*>& links);
  /// Closes all links with `why`, so that the peers learn the reason. Waits until it is written, at most
  /// kLastReportTime. The first call counts.
  void shut_down(Error why);
  bool is_shut_down() const { return links_.is_closed(); }

 private:
  Loop& loop_;
  LinkTable& links_;
  std::unordered_map<Rank, Error> lost_;
  std::optional<Error> failure_;
  std::atomic<bool> abort_requested_ = false;
  mutable std::mutex abort_mutex_;
  std::optional<Error> abort_;  ///< guarded by abort_mutex_; does not change once abort_requested_ is set
};

}  // namespace muster
