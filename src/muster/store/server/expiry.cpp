#include "muster/store/server/expiry.h"

#include <algorithm>

namespace muster {
namespace {

// A link is dead after this silence, or after `link_grace` if that is shorter. The silence is at least
// kMissedKeepalives keepalive intervals, which are longer with many proxies.
constexpr Duration kSilentLink = 20s;
constexpr int kMissedKeepalives = 3;

// How long a lease lasts on a holder's clock that runs a quarter slower than this clock.
Duration with_clock_drift(Duration lease) { return lease * 5 / 4; }

}  // namespace

void SessionExpiry::link_up() {
  linked_ = true;
  heard();
}

void SessionExpiry::link_lost() {
  if (linked_) unlinked_since_ = clock_->now();
  linked_ = false;
}

SessionExpiry::Grant SessionExpiry::grant(size_t proxies, Duration lease_left) {
  const int64_t growth = interval_growth(proxies);
  const Duration lease = std::min(limits_.lease_time * growth, lease_left);
  leases_end_ = std::max(leases_end_, heard_ + with_clock_drift(lease));
  return {lease, kKeepaliveInterval * growth};
}

SessionExpiry::Expired SessionExpiry::expired(size_t proxies) const {
  const TimePoint now = clock_->now();
  const Duration keepalives = kMissedKeepalives * kKeepaliveInterval * interval_growth(proxies);
  const Duration silence = std::max(std::min(kSilentLink, limits_.link_grace), keepalives);
  // A frame may bring a lease without time to use it, because `lease_left` was 0. leases_end_ does not cover such a
  // lease. It ends as if it held for the usual time.
  return {.leases = now > std::max(leases_end_, heard_ + with_clock_drift(limits_.lease_time)),
          .link = linked_ && now - heard_ > silence,
          .session = !linked_ && now - unlinked_since_ > limits_.link_grace};
}

bool RequestTimeouts::heard(ClientId client) {
  const TimePoint now = clock_.now();
  const auto [found, added] = heard_.insert_or_assign(client, now);
  if (added) queue_.emplace_back(now, client);
  return added && queue_.size() == 1;
}

std::optional<TimePoint> RequestTimeouts::next() const {
  if (queue_.empty()) return std::nullopt;
  return queue_.front().first + timeout_;
}

std::vector<ClientId> RequestTimeouts::take_expired() {
  std::vector<ClientId> expired;
  const TimePoint now = clock_.now();
  while (!queue_.empty() && now - queue_.front().first >= timeout_) {
    const ClientId client = queue_.front().second;
    queue_.pop_front();
    const auto found = heard_.find(client);
    if (now - found->second < timeout_) {
      queue_.emplace_back(now, client);
      continue;
    }
    expired.push_back(client);
    heard_.erase(found);
  }
  return expired;
}

}  // namespace muster
