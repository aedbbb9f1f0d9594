#include "muster/group/engine/failure_detector.h"

#include <memory>
#include <set>

#include "muster/transport/links/process_monitor.h"

namespace muster {
namespace {

/// How long a live peer may take to answer a ping. A peer that waits in the middle of a frame cannot read the ping, but
/// it sends pings itself once its own deadline has passed.
constexpr Duration kPongTime = std::chrono::seconds(2);

}  // namespace

void FailureDetector::on_lost(Rank rank, const Error& why) {
  if (!lost_.emplace(rank, why).second) return;
  if (why.code != ErrorCode::kLeft) fail(why);
}

void FailureDetector::fail(Error why) {
  if (!failure_) failure_ = std::move(why);
}

void FailureDetector::request_abort(Error why) {
  {
    const std::lock_guard lock(abort_mutex_);
    if (!abort_) abort_ = std::move(why);
  }
  abort_requested_.store(true, std::memory_order_release);
  loop_.wake();
}

const Error* FailureDetector::lost(Rank rank) const {
  const auto found = lost_.find(rank);
  return found == lost_.end() ? nullptr : &found->second;
}

std::optional<Error> FailureDetector::interruption() const {
  if (failure_ || !interrupted()) return failure_;
  const std::lock_guard lock(abort_mutex_);
  return abort_;
}

bool FailureDetector::wait_for_report() {
  (void)loop_.run_until([this] { return failure_.has_value(); }, Deadline::after(kLastReportTime));
  return failure_.has_value();
}

std::vector<Rank> FailureDetector::silent_ranks(const std::vector<Link*>& links) {
  // Shared with the ping callbacks, because a pong may arrive after this function has returned.
  const auto silent = std::make_shared<std::set<Rank>>();
  for (Link* link : links) {
    if (link == nullptr || !link->is_open()) continue;
    const Rank rank = link->peer().rank;
    silent->insert(rank);
    link->ping([silent, rank] { silent->erase(rank); });
  }
  const auto all_answered = [&] {
    std::erase_if(*silent, [this](Rank rank) { return lost(rank) != nullptr; });
    return silent->empty() || failure_;
  };
  (void)loop_.run_until(all_answered, Deadline::after(kPongTime));
  return {silent->begin(), silent->end()};
}

void FailureDetector::shut_down(Error why) {
  if (is_shut_down()) return;
  if (why.phase != GroupPhase::kLeft) why.phase = GroupPhase::kRunning;
  fail(why);
  links_.close(why);
  // The reason may have to wait for space in a socket buffer, and the peers name the right rank only if the reason
  // arrives. A rank that leaves in order does not wait, because no data is queued before its message.
  if (why.phase == GroupPhase::kLeft) return;
  (void)loop_.run_until([this] { return !loop_.has_watches(); }, Deadline::after(kLastReportTime));
}

}  // namespace muster
