#pragma once

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "muster/store/state.h"

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
class LeaseTable {
 public:
  static constexpr int kMaxRecalls = 2;
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
    bool leasable() const { return !recalling && recalls < kMaxRecalls; }
  };

  bool holds(const Holder& holder) const;
  bool settle(Record& record);

  std::unordered_map<Key, Record> records_;
  std::unordered_map<ClientId, uint32_t> terms_;
  std::unordered_map<ClientId, std::unordered_set<Key>> owed_;  // recalled, and not yet given back
  size_t leases_ = 0;
};

}  // namespace muster
