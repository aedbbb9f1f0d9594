#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "muster/base/clock.h"
#include "muster/io/address.h"

namespace muster {

/// Where a connection comes from, as far as one owner has all of it: an IPv4 address, or the /64 network of an IPv6
/// address. All Unix sockets are one.
std::string network_of(const Address& peer);

/// The connections of an acceptor that have not proved themselves, and which of them gives way to a newcomer when there
/// is no room for more. Anybody may open connections and say nothing, so:
/// - the network with the most connections gives way first; one that a member has come from counts as having fewer,
///   by half of the room;
/// - a connection that has sent nothing gives way once it is kSilentGrace old: a member greets as soon as it is
///   connected. One that has begun its handshake has kStepGrace for each of a few steps.
///
/// A flood thus delays members by kSilentGrace for as many connections as there is room for, also where it comes from
/// the members' own network. Knows no socket and no clock. Not thread-safe.
class HandshakeQueue {
 public:
  static constexpr Duration kSilentGrace = std::chrono::milliseconds(10);
  static constexpr Duration kStepGrace = std::chrono::milliseconds(500);
  static constexpr int kMaxSteps = 4;              ///< the most that a handshake takes, TLS included
  static constexpr size_t kMaxMembers = 16 << 10;  ///< networks that are remembered for their members

  explicit HandshakeQueue(size_t room) : room_(room) {}

  void add(int id, const std::string& network, TimePoint now);
  /// The connection has sent something.
  void on_bytes(int id, TimePoint now);
  bool is_silent(int id) const { return entries_.at(id).steps == 0; }
  void remove(int id);
  /// The connection has proved itself: a member is where it comes from. It is removed.
  void on_authenticated(int id);

  struct Candidate {
    int id;
    TimePoint due;  ///< it may be closed from then on, and not before
  };
  /// Which gives way to the next newcomer; nothing if there is none.
  std::optional<Candidate> next() const;

 private:
  struct Network {
    size_t count = 0;
    bool has_members = false;
  };
  using Order = std::list<int>;  // the oldest first
  struct Entry {
    const std::string* name;
    Network* network;
    TimePoint since;  // it took its last step
    int steps = 0;
    Order::iterator place;  // in silent_ or begun_
  };

  int64_t excess(const Network& network) const;
  std::optional<Candidate> oldest(const Order& order, Duration grace, int64_t excess) const;

  const size_t room_;
  std::unordered_map<std::string, Network> networks_;  // with connections here
  std::unordered_set<std::string> members_;            // networks that members have come from
  std::unordered_map<int, Entry> entries_;
  Order silent_, begun_;
};

}  // namespace muster
