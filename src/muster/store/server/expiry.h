#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "muster/store/state/lease.h"

namespace muster {

/// How long a proxy's leases, link and session outlive its silence. The server and the simulator use it, each with its
/// own clock. Not thread-safe.
class SessionExpiry {
 public:
  struct Limits {
    Duration lease_time = kLeaseTime;  ///< for how long leases hold after a keepalive
    Duration link_grace = 30s;         ///< for how long a session waits for a new link
  };
  /// Borrows the clock.
  SessionExpiry(const Clock& clock, Limits limits) : clock_(&clock), limits_(limits) {}

  void link_up();
  void link_lost();
  bool linked() const { return linked_; }
  /// The proxy sent something.
  void heard() { heard_ = clock_->now(); }

  struct Grant {
    Duration lease;               ///< how long the proxy may use leases, from its latest frame on
    Duration keepalive_interval;  ///< how often it must send a frame
  };
  /// What the next frame to the proxy says. With many `proxies` both grow: see lease.h. `lease_left`: how long this
  /// server may use the leases that it passes on.
  Grant grant(size_t proxies, Duration lease_left);

  struct Expired {
    bool leases = false;
    bool link = false;     ///< the link is dead, although neither end has closed it
    bool session = false;  ///< the proxy did not come back in time
  };
  Expired expired(size_t proxies) const;
  /// When the last lease that was granted has ended, on a clock that runs up to a quarter slower too.
  TimePoint leases_end() const { return leases_end_; }

 private:
  const Clock* clock_;
  Limits limits_;
  bool linked_ = false;
  TimePoint heard_{};
  TimePoint unlinked_since_{};
  TimePoint leases_end_{INT64_MIN};
};

/// Finds clients that stopped in the middle of a request. Not thread-safe.
class RequestTimeouts {
 public:
  /// Borrows the clock.
  RequestTimeouts(const Clock& clock, Duration timeout) : clock_(clock), timeout_(timeout) {}
  /// The client sent a part of a request. True if next() was not set before.
  bool heard(ClientId client);
  /// When take_expired() must be called; only where a client is waited for.
  std::optional<TimePoint> next() const;
  /// Clients that have sent nothing for the timeout, and are not waited for any more. Some may have completed their
  /// requests.
  std::vector<ClientId> take_expired();

 private:
  const Clock& clock_;
  const Duration timeout_;
  std::unordered_map<ClientId, TimePoint> heard_;
  std::deque<std::pair<TimePoint, ClientId>> queue_;  // the clients of heard_, and when each was put here
};

}  // namespace muster
