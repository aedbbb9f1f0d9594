#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "muster/store/state/lease.h"

namespace muster {

/// Decides how long the leases, the link and the session of a silent proxy last. The server and the simulator use it,
/// each with its own clock. Not thread-safe.
class SessionExpiry {
 public:
  struct Limits {
    Duration lease_time = kLeaseTime;  ///< how long leases hold after a keepalive
    Duration link_grace = 30s;         ///< how long a session waits for a new link
  };
  /// Borrows the clock.
  SessionExpiry(const Clock& clock, Limits limits) : clock_(&clock), limits_(limits) {}

  void link_up();
  void link_lost();
  bool linked() const { return linked_; }
  /// Call this when the proxy has sent something.
  void heard() { heard_ = clock_->now(); }

  struct Grant {
    Duration lease;               ///< how long the proxy may use leases, from its latest frame on
    Duration keepalive_interval;  ///< how often it must send a frame
  };
  /// Returns the durations for the next frame to the proxy. With many `proxies` both grow: see lease.h. `lease_left` is
  /// how long this server may itself use the leases that it passes on.
  Grant grant(size_t proxies, Duration lease_left);

  struct Expired {
    bool leases = false;
    bool link = false;     ///< the link is dead, although neither end has closed it
    bool session = false;  ///< the proxy did not come back in time
  };
  Expired expired(size_t proxies) const;
  /// The time at which the last granted lease has ended, even on a holder's clock that runs up to a quarter slower.
  TimePoint leases_end() const { return leases_end_; }

 private:
  const Clock* clock_;
  Limits limits_;
  bool linked_ = false;
  TimePoint heard_{};
  TimePoint unlinked_since_{};
  TimePoint leases_end_{INT64_MIN};
};

/// Finds clients that stop in the middle of a request. Not thread-safe.
class RequestTimeouts {
 public:
  /// Borrows the clock.
  RequestTimeouts(const Clock& clock, Duration timeout) : clock_(clock), timeout_(timeout) {}
  /// Call this when the client has sent a part of a request. True if next() was not set before.
  bool heard(ClientId client);
  /// The time at which take_expired() must be called. Not set if no client is in the middle of a request.
  std::optional<TimePoint> next() const;
  /// Removes and returns the clients that have sent nothing for the timeout. Some of them may have completed their
  /// requests, so the caller must check.
  std::vector<ClientId> take_expired();

 private:
  const Clock& clock_;
  const Duration timeout_;
  std::unordered_map<ClientId, TimePoint> heard_;
  std::deque<std::pair<TimePoint, ClientId>> queue_;  // the clients of heard_, with the time of their insertion
};

}  // namespace muster
