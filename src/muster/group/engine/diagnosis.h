#pragma once

#include <unordered_map>
#include <vector>

#include "muster/collective/call.h"
#include "muster/collective/group_spec.h"
#include "muster/flight/report.h"
#include "muster/group/engine/failure_detector.h"

namespace muster {

/// Finds out why a collective does not end: which rank is in which call, and which rank does not answer. It reads the
/// flight recorders of this host's ranks. A rank that waits for a long time also sends its call to the others over the
/// links. Not thread-safe: used by the thread that drives the loop.
class Diagnosis {
 public:
  /// `group_id` is the id in the flight recorders. `compares_calls`: MUSTER_DEBUG=detail is on, so every mismatch is
  /// found before the call runs.
  Diagnosis(const GroupSpec& spec, const std::vector<RankInfo>& members, uint64_t group_id, bool compares_calls,
            FailureDetector& detector);

  bool compares_calls() const { return compares_calls_; }
  /// This rank begins `call`, which must live until end().
  void begin(const Call& call);
  void end() { running_ = nullptr; }

  /// Must be called repeatedly during a wait, because ranks in different calls may wait for each other forever. At
  /// intervals that double each time, it sends this rank's call to all peers and compares the ranks' calls. Returns
  /// kMismatch if the calls differ.
  Result<> check_desync(const std::vector<Link*>& links);
  /// The time at which check_desync() next does its check.
  TimePoint next_check() const { return next_check_.when(); }
  /// Handles a peer's control message: the call in which the peer waits.
  void on_peer_call(Rank rank, ByteView message);

  /// The error for a wait for `awaited` that missed its deadline. The awaited rank may itself wait for the rank that
  /// causes the delay: a rank that is stopped, or that is not in the call. May ping the peers and wait for their
  /// answers (FailureDetector::silent_ranks()).
  Error timeout_error(const std::vector<Rank>& awaited, const std::vector<Link*>& links);
  /// Replaces the text and the rank of a timeout or a mismatch with a report of the calls that all ranks are in.
  /// Returns false and leaves the error alone if there is nothing to report.
  bool explain(Error& error) const { return running_ != nullptr && explain(error, running_->sequence); }

 private:
  bool explain(Error& error, uint64_t sequence) const;
  Result<> fail_if_mismatch(uint64_t sequence);
  std::vector<RankState> collect_rank_states(uint64_t sequence) const;

  const GroupSpec spec_;
  const std::vector<RankInfo>& members_;
  const uint64_t group_id_;
  const bool compares_calls_;
  FailureDetector& detector_;
  const Call* running_ = nullptr;              ///< the current call
  std::unordered_map<Rank, Call> peer_calls_;  ///< the last call that a peer sent because it waited for a long time
  Deadline next_check_ = Deadline::never();
  Duration interval_{};  ///< between two checks; zero before the first
};

}  // namespace muster
