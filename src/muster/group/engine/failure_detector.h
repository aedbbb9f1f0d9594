#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "muster/transport/links/link_table.h"

namespace muster {

/// Keeps the reason why a group's collectives cannot continue: the first failure that a link, a process or a peer
/// reports, or the abort that was requested. Only request_abort() is thread-safe. The other functions belong to the
/// thread that drives the loop.
class FailureDetector {
 public:
  FailureDetector(Loop& loop, LinkTable& links) : loop_(loop), links_(links) {}

  /// A link to the rank has ended, or the process of the rank has died. A rank that left in order does not count as a
  /// failure, because it may have finished its part of the current call.
  void on_lost(Rank rank, const Error& why);
  /// Records a failure, unless one is recorded already.
  void fail(Error why);
  /// Makes the current call fail soon. Later requests have no effect. Thread-safe.
  void request_abort(Error why);

  /// The first failure; no call runs after it.
  const std::optional<Error>& failure() const { return failure_; }
  /// The reason why a rank is gone, or null if the rank is not gone.
  const Error* lost(Rank rank) const;
  /// True if there is a failure or a request to abort. Cheap enough for every iteration of a wait: one atomic load. The
  /// acquire load pairs with the release store in request_abort().
  bool interrupted() const { return failure_.has_value() || abort_requested_.load(std::memory_order_acquire); }
  /// The failure if there is one, else the requested abort, if any.
  std::optional<Error> interruption() const;

  /// Waits until a peer reports a failure, at most kLastReportTime. Returns true if failure() is set.
  bool wait_for_report();
  /// Pings all linked ranks. Returns those that did not answer within kPongTime.
  std::vector<Rank> silent_ranks(const std::vector<Link*>& links);
  /// Closes all links with `why`, so that the peers learn the reason. Waits until the reason is written, at most
  /// kLastReportTime. Later calls have no effect.
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
