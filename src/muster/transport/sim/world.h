#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "muster/base/clock.h"
#include "muster/transport/link.h"

namespace muster::sim {

/// What the simulated network does. Times are virtual.
struct Faults {
  Duration min_delay = std::chrono::microseconds(5);
  Duration max_delay = std::chrono::microseconds(50);
  double bytes_per_second = 10e9;                                 ///< per link and direction
  double short_read = 0;                                          ///< chance that a delivery is split
  double drop = 0;                                                ///< chance that a parcel is lost; below 1
  Duration retransmit_after = std::chrono::milliseconds(5);       ///< then it is sent again, and may be lost again
  Duration loss_detected_after = std::chrono::milliseconds(200);  ///< a crash or a lasting partition becomes kPeerLost
};

/// Thousands of peers in one process on a virtual clock, driven by a seed. Single-threaded; the same seed and the same
/// calls give the same run. Links behave as Link says: ordered, reliable until the peer is lost. A drop therefore shows
/// as it does above TCP: its bytes come late, and hold up those behind them.
class World {
 public:
  World(uint64_t seed, Faults faults = {});
  ~World();

  const Clock& clock() const;
  /// The two ends of a new link between ranks a and b: first a's, then b's.
  std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> connect(Rank a, Rank b);

  /// The rank stops at once; its peers learn it after loss_detected_after. Its own completions never run again.
  void crash(Rank rank);
  /// The rank's events are held back until resume() (SIGSTOP).
  void stop(Rank rank);
  void resume(Rank rank);
  /// No bytes between the two sides until heal().
  void partition(Rank a, Rank b);
  void heal(Rank a, Rank b);

  /// Calls back at a virtual time, for test drivers.
  void at(TimePoint when, std::function<void()> callback);
  /// Runs the next event; false when there is none.
  bool step();
  /// Steps until `done()`; kTimeout when the virtual deadline passes or nothing is left to happen.
  Result<> run_until(const std::function<bool()>& done, const Deadline& deadline);

  uint64_t events() const;               ///< so far
  uint64_t bytes_sent(Rank from) const;  ///< payload bytes handed to the network, not counting what is sent again
  uint64_t drops() const;                ///< parcels lost so far; one that is lost twice counts twice

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace muster::sim
