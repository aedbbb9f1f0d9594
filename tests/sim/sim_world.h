#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <unordered_map>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/random.h"
#include "muster/transport/link.h"

namespace muster::sim {

class SimLink;

/// The behavior of the simulated network. Times are virtual.
struct Faults {
  Duration min_delay = std::chrono::microseconds(5);
  Duration max_delay = std::chrono::microseconds(50);
  double bytes_per_second = 10e9;                            ///< per link and direction
  double short_read = 0;                                     ///< chance that a delivery is split
  double drop = 0;                                           ///< chance that a packet is lost; below 1
  Duration retransmit_after = std::chrono::milliseconds(5);  ///< a lost packet is sent again, and may be lost again
  Duration loss_detected_after = std::chrono::milliseconds(200);  ///< a crash or a lasting partition becomes kPeerLost
};

/// Simulates thousands of peers in one process, on a virtual clock. Single-threaded; the same seed and the same calls
/// give the same run. Links behave as Link says: ordered, and reliable until the peer is lost. So a lost packet looks
/// as it does above TCP: its bytes arrive late and delay the bytes behind them.
class World {
 public:
  World(uint64_t seed, Faults faults = {});
  ~World();

  const Clock& clock() const { return clock_; }
  /// The two ends of a new link between ranks a and b: first a's, then b's.
  std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> connect(Rank a, Rank b);

  /// The rank stops at once. Its own completions never run again. Its peers notice after loss_detected_after.
  void crash(Rank rank);
  /// Holds back the rank's events until resume(), like SIGSTOP.
  void stop(Rank rank) { stopped_.try_emplace(rank); }
  void resume(Rank rank);
  /// The network carries no bytes between the two ranks until heal().
  void partition(Rank a, Rank b);
  void heal(Rank a, Rank b);

  /// Calls back at a virtual time.
  void at(TimePoint when, std::function<void()> callback);
  /// Runs the next event; false if there is none.
  bool step();
  /// Steps until `done()`. kTimeout if the virtual deadline passes or no event is left.
  Result<> run_until(const std::function<bool()>& done, const Deadline& deadline);

  uint64_t events() const { return events_run_; }  ///< so far
  uint64_t bytes_sent(Rank from) const;            ///< payload bytes given to the network, without retransmissions
  uint64_t drops() const { return drops_; }        ///< packets lost so far; one that is lost twice counts twice

 private:
  friend class SimLink;
  enum class Kind : uint8_t { kArrive, kWindowUpdate, kPing, kPong, kControl, kPeerCrashed, kPartitioned, kCallback };
  struct VirtualClock final : Clock {
    TimePoint now() const override { return time; }
    TimePoint time;
  };
  struct Event {
    TimePoint when;
    uint64_t order;
    uint64_t detail;  // kPartitioned: which partition
    uint32_t link;
    Kind kind;
    bool operator<(const Event& other) const {  // std::priority_queue has the largest on top: here the earliest
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  using Pair = std::pair<Rank, Rank>;
  struct Partition {
    uint64_t number;
    std::vector<Event> held;
  };

  TimePoint now() const { return clock_.now(); }
  Duration random_delay();
  /// The delay of a packet: a random delay, plus retransmit_after for each loss.
  Duration packet_delay();
  /// Events name links by number, so that an event of a link that is gone has no effect.
  void schedule(TimePoint when, Kind kind, uint32_t link, uint64_t detail = 0);
  void advance_to(TimePoint when) { clock_.time.ns = std::max(clock_.time.ns, when.ns); }
  static Pair pair_of(Rank a, Rank b) { return a < b ? Pair{a, b} : Pair{b, a}; }
  void run_callback(uint64_t order);
  void dispatch(const Event& event, SimLink& link);
  void schedule_partition(SimLink& link, uint64_t number);
  template <class Visitor>
  void for_each_link(Rank rank, Visitor visit);

  VirtualClock clock_;
  Random random_;
  Faults faults_;
  std::priority_queue<Event> events_;
  std::unordered_map<uint64_t, std::function<void()>> callbacks_;  // by the order of their event
  std::vector<SimLink*> links_;                                    // null: destroyed
  std::unordered_map<Rank, std::vector<uint32_t>> links_of_;
  std::map<Pair, Partition> partitions_;
  std::unordered_map<Rank, std::vector<Event>> stopped_;  // with the events that are held back
  std::unordered_map<Rank, uint64_t> bytes_sent_;
  uint64_t next_order_ = 0;
  uint64_t events_run_ = 0;
  uint64_t drops_ = 0;
};

}  // namespace muster::sim
