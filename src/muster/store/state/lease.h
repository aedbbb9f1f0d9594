#pragma once

#include <algorithm>
#include <list>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "muster/store/state/state.h"

namespace muster {

/// How long a proxy may use what it holds leases of, at most, counted from when it sent the latest message that the
/// server is known to have had. The server counts its leases as ended after a longer silence. (Gray and Cheriton,
/// "Leases: an efficient fault-tolerant mechanism for distributed file cache consistency", SOSP 1989.)
inline constexpr Duration kLeaseTime = std::chrono::seconds(4);
inline constexpr Duration kLeaseEnd = kLeaseTime * 5 / 4;  ///< the gap is for clocks that do not run alike
/// How often a proxy gives a sign of life, which also renews its leases.
inline constexpr Duration kBeat = std::chrono::milliseconds(1500);
/// A server with so many proxies wants to hear from each more seldom, and its leases hold for longer in proportion:
/// the signs of life of all are as much work for it as those of this many.
inline constexpr size_t kProxiesPerBeat = 1024;
inline constexpr int64_t kMaxBeatGrowth = 8;
inline int64_t beat_growth(size_t proxies) {
  return std::clamp<int64_t>(static_cast<int64_t>(proxies / kProxiesPerBeat), 1, kMaxBeatGrowth);
}

/// Who may answer reads of which keys from memory. Whoever changes a key first takes back every lease of it. A key
/// that was taken back kMaxRecalls times is not leased again: it is no constant. Knows no clock: the owner says
/// revoke() when a holder was silent for too long. Not thread-safe.
///
/// Its memory follows the leases that hold. Those that were revoked are taken out when they have become most of all, so
/// that a holder's end costs nothing then; of keys that nobody holds only the latest are remembered as no constants.
class LeaseTable {
 public:
  static constexpr int kMaxRecalls = 2;
  static constexpr size_t kMaxIdle = 4096;   ///< keys that are remembered for having been taken back
  static constexpr size_t kMaxEnded = 1024;  ///< leases that were revoked and are still here, or as many as hold
  static constexpr size_t kMaxLeases = size_t{1} << 24;  ///< in all; then no more are granted

  /// Whether the key may be leased now.
  bool leasable(const Key& key) const;
  /// False if it may not be leased.
  bool grant(const Key& key, ClientId holder);
  /// Takes the key back: a recall for each holder (once) goes to `out`. True if nobody holds it (any more).
  bool recall(const Key& key, Replies& out);
  /// The holder gives the key back. True if it is free now and was being recalled.
  bool release(const Key& key, ClientId holder);
  /// The holder's leases have ended. Appends the keys that are free now and were being recalled.
  void revoke(ClientId holder, std::vector<Key>& freed);
  size_t size() const { return leases_; }
  size_t records() const { return records_.size(); }
  size_t holders() const { return clients_.size(); }

 private:
  struct Holder {
    ClientId client;
    uint32_t term;  // counts the client's revocations: a lease of an earlier term has ended
    friend auto operator<=>(const Holder&, const Holder&) = default;
  };
  struct Record {
    std::vector<Holder> holders;  // sorted
    int recalls = 0;
    bool recalling = false;
    std::optional<std::list<Key>::iterator> idle;  // where it is in idle_
    bool leasable() const { return !recalling && recalls < kMaxRecalls; }
  };

  // Who has leases here, of the present term or earlier ones.
  struct Client {
    uint32_t term = 0;
    size_t leases = 0, ended = 0;
  };
  using Records = std::unordered_map<Key, Record>;

  bool holds(const Holder& holder) const;
  bool settle(Record& record);
  void take_out(const Holder& holder);
  size_t take_out_ended(Record& record);
  void rest(Records::iterator record);
  void forget_idle();
  void sweep();

  Records records_;
  std::unordered_map<ClientId, Client> clients_;
  std::unordered_map<ClientId, std::unordered_set<Key>> owed_;  // recalled, and not yet given back
  std::list<Key> idle_;  // keys that nobody holds and that were taken back, the latest last
  size_t leases_ = 0;    // those that have ended included
  size_t ended_ = 0;
};

}  // namespace muster
