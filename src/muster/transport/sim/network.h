#pragma once

#include <map>
#include <queue>
#include <unordered_map>
#include <vector>

#include "muster/base/random.h"
#include "muster/transport/sim/world.h"

namespace muster::sim {

class SimLink;

/// The virtual clock and what is due on it, in order of time and then of scheduling. Links are known by number, so that
/// what was due for a link that is gone falls to the ground.
class Network {
 public:
  enum class Kind : uint8_t { kArrive, kWindowUpdate, kPing, kPong, kControl, kPeerCrashed, kPartitioned, kCallback };

  Network(uint64_t seed, Faults faults);
  ~Network();

  const Clock& clock() const { return clock_; }
  TimePoint now() const { return clock_.now(); }
  Random& random() { return random_; }
  const Faults& faults() const { return faults_; }
  Duration random_delay();
  /// How long a parcel takes that is on the line now: a random delay, after as many retransmissions as it needs.
  Duration packet_delay();

  std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> connect(Rank a, Rank b);
  void forget(uint32_t link) { links_[link] = nullptr; }
  void schedule(TimePoint when, Kind kind, uint32_t link, uint64_t detail = 0);
  void at(TimePoint when, std::function<void()> callback);
  void count_sent(Rank from, size_t bytes) { bytes_sent_[from] += bytes; }

  void crash(Rank rank);
  void stop(Rank rank) { stopped_.try_emplace(rank); }
  void resume(Rank rank);
  void partition(Rank a, Rank b);
  void heal(Rank a, Rank b);

  bool step();
  /// The time of the next event; nothing when nothing is due.
  const TimePoint* next_time() const { return events_.empty() ? nullptr : &events_.top().when; }
  void advance_to(TimePoint when) { clock_.time.ns = std::max(clock_.time.ns, when.ns); }
  uint64_t events() const { return events_run_; }
  uint64_t bytes_sent(Rank from) const;
  uint64_t drops() const { return drops_; }

 private:
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
    bool operator<(const Event& other) const {  // a std heap has its largest on top: the earliest is "largest"
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  using Pair = std::pair<Rank, Rank>;
  struct Partition {
    uint64_t number;
    std::vector<Event> held;
  };

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
  std::unordered_map<Rank, std::vector<Event>> stopped_;  // with what is held back
  std::unordered_map<Rank, uint64_t> bytes_sent_;
  uint64_t next_order_ = 0;
  uint64_t events_run_ = 0;
  uint64_t drops_ = 0;
};

}  // namespace muster::sim
