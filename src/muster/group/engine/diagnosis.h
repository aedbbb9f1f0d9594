#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/collective/call.h"
#include "muster/collective/group_spec.h"
#include "muster/flight/report.h"
#include "muster/group/engine/failure_detector.h"

namespace muster {

/// Finds out why a collective does not end: which rank is in which call, and which rank gives no sign of life. It reads
/// the flight recorders of this host's ranks; ranks that wait for long tell the others their call over the links. Used
/// by the thread that drives the loop.
class Diagnosis {
 public:
  /// `group_id` as in the recorders. `compares_calls`: MUSTER_DEBUG=detail has found every mismatch before.
  Diagnosis(const GroupSpec& spec, const std::vector<RankInfo>& members, uint64_t group_id, bool compares_calls,
            FailureDetector& detector);

  bool compares_calls() const { return compares_calls_; }
  /// `call` begins at this rank; it must live until end().
  void begin(const Call& call);
  void end() { running_ = nullptr; }

  /// To be called again and again during a wait. From time to time, and less and less often, it sends this rank's call
  /// to all peers and compares the ranks' calls: ranks in different calls may wait for each other for ever. kMismatch
  /// if they are.
  Result<> check_desync(const std::vector<Link*>& links);
  /// When check_desync() has something to do next.
  TimePoint next_check() const { return next_check_.when(); }
  /// A peer has sent the call in which it waits.
  void on_peer_call(Rank rank, ByteView message);

  /// The error of a missed deadline, in a wait for `awaited`. A rank that this one waits for may itself wait for the
  /// culprit: a rank that is stopped, or not in the call. May take FailureDetector's pings.
  Error timeout_error(const std::vector<Rank>& awaited, const std::vector<Link*>& links);
  /// Replaces the text and the rank of a timeout or a mismatch by a report of where all ranks are. False if that says
  /// no more than the error does.
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
  std::unordered_map<Rank, Call> peer_calls_;  ///< the last call in which a peer waited for long
  Deadline next_check_ = Deadline::never();
  Duration interval_{};  ///< between two checks; zero before the first
};

}  // namespace muster
