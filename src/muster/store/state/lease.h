#pragma once

#include <algorithm>
#include <list>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "muster/store/state/state.h"

namespace muster {

/// How long a proxy may use its leases. The time counts from the moment at which the proxy sent the latest message that
/// the server acknowledged. The server treats leases as ended after a silence that is a quarter longer, because clocks
/// drift. (Gray and Cheriton, "Leases: an efficient fault-tolerant mechanism for distributed file cache consistency",
/// SOSP 1989.)
inline constexpr Duration kLeaseTime = std::chrono::seconds(4);
/// How often a proxy sends a keepalive, which also renews its leases.
inline constexpr Duration kKeepaliveInterval = std::chrono::milliseconds(1500);
/// With n times this number of proxies, a server asks each proxy for a keepalive n times less often, and the leases
/// hold n times longer. So the keepalives of all proxies cost about as much as those of kProxiesPerInterval proxies. n
/// is at most kMaxIntervalGrowth.
inline constexpr size_t kProxiesPerInterval = 1024;
inline constexpr int64_t kMaxIntervalGrowth = 8;
inline int64_t interval_growth(size_t proxies) {
  return std::clamp<int64_t>(static_cast<int64_t>(proxies / kProxiesPerInterval), 1, kMaxIntervalGrowth);
}

/// Leases of keys. A holder of a key's lease may answer reads of the key from memory. Before a key changes, all its
/// leases are recalled. A key that was recalled kMaxRecalls times is not leased again, because it changes too often.
/// The table knows no clock. Its owner calls revoke() when a holder was silent for too long. Not thread-safe.
///
/// revoke() only counts the leases as ended, so it is cheap. A sweep removes ended leases once they are the majority.
/// The table remembers only the kMaxIdle latest recalled keys without holders.
class LeaseTable {
 public:
  static constexpr int kMaxRecalls = 2;
  static constexpr size_t kMaxIdle = 4096;               ///< recalled keys without holders that are remembered
  static constexpr size_t kMaxEnded = 1024;              ///< no sweep up to this number of ended leases
  static constexpr size_t kMaxLeases = size_t{1} << 24;  ///< a full table grants no leases

  /// True if the key may be leased now.
  bool leasable(const Key& key) const;
  /// False if the key may not be leased.
  bool grant(const Key& key, ClientId holder);
  /// Recalls the key. True if it has no holder. Otherwise the first call appends one recall for each holder to `out`.
  bool recall(const Key& key, Replies& out);
  /// Ends the holder's lease of the key. True if that was the last lease of a recalled key.
  bool release(const Key& key, ClientId holder);
  /// Ends all leases of the holder. Appends to `freed` the recalled keys that have no holder any more.
  void revoke(ClientId holder, std::vector<Key>& freed);
  size_t size() const { return leases_; }
  size_t records() const { return records_.size(); }
  size_t holders() const { return clients_.size(); }

 private:
  struct Holder {
    ClientId client;
    uint32_t term;  // the client's term when the lease was granted; if it differs now, the lease has ended
    friend auto operator<=>(const Holder&, const Holder&) = default;
  };
  struct Record {
    std::vector<Holder> holders;  // sorted
    int recalls = 0;
    bool recalling = false;
    std::optional<std::list<Key>::iterator> idle;  // its position in idle_
    bool leasable() const { return !recalling && recalls < kMaxRecalls; }
  };

  // A client with leases in the table. `term` counts its revocations. `leases` counts the leases of the current term,
  // and `ended` those of earlier terms.
  struct Client {
    uint32_t term = 0;
    size_t leases = 0, ended = 0;
  };
  using Records = std::unordered_map<Key, Record>;

  void remove_lease(const Holder& holder);
  size_t remove_ended(Record& record);
  void make_idle(Records::iterator record);
  void forget_idle();
  void sweep();

  Records records_;
  std::unordered_map<ClientId, Client> clients_;
  std::unordered_map<ClientId, std::unordered_set<Key>> owed_;  // recalled keys that the client has not given back
  std::list<Key> idle_;                                         // recalled keys without holders, the latest last
  size_t leases_ = 0;                                           // including ended leases
  size_t ended_ = 0;
};

}  // namespace muster
