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

/// The network that a connection comes from: an IPv4 address, or the /64 prefix of an IPv6 address, because one owner
/// usually has all of it. All Unix sockets are one network.
std::string network_of(const Address& peer);

/// Holds the unauthenticated connections of an acceptor. When there is no room, it chooses the one that is evicted for
/// a new one. Any process may open connections and send nothing, so:
/// - a connection of the network with the most connections is evicted first. A network from which a peer has
///   authenticated counts as having fewer, by half of the room;
/// - a connection that has sent nothing may be evicted after kSilentGrace, because a muster peer sends its greeting
///   at once. A connection that has begun its handshake has kStepGrace for each of a few steps.
///
/// So a flood of k times `room` connections delays a peer by k times kSilentGrace, even from the peer's own network.
/// Uses no socket and no clock. Not thread-safe.
class HandshakeQueue {
 public:
  static constexpr Duration kSilentGrace = std::chrono::milliseconds(10);
  static constexpr Duration kStepGrace = std::chrono::milliseconds(500);
  static constexpr int kMaxSteps = 4;              ///< the most steps of a handshake, with TLS
  static constexpr size_t kMaxMembers = 16 << 10;  ///< networks with authenticated peers that are remembered

  explicit HandshakeQueue(size_t room) : room_(room) {}

  void add(int id, const std::string& network, TimePoint now);
  /// The connection has sent something.
  void on_bytes(int id, TimePoint now);
  bool is_silent(int id) const { return entries_.at(id).steps == 0; }
  void remove(int id);
  /// The peer has authenticated: remembers its network and removes the connection.
  void on_authenticated(int id);

  struct Candidate {
    int id;
    TimePoint due;  ///< the earliest time at which it may be closed
  };
  /// The connection to evict for the next new one; empty if there is none.
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
    TimePoint since;  // of its last step
    int steps = 0;
    Order::iterator position;  // in silent_ or begun_
  };

  int64_t excess(const Network& network) const;
  std::optional<Candidate> oldest(const Order& order, Duration grace, int64_t excess) const;

  const size_t room_;
  std::unordered_map<std::string, Network> networks_;  // those with a connection in entries_
  std::unordered_set<std::string> members_;            // networks from which a peer has authenticated
  std::unordered_map<int, Entry> entries_;
  Order silent_, begun_;
};

}  // namespace muster
