#pragma once

// The parts of a Proxy. Each part is a separate state machine. The parts share only the output.

#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "muster/store/state/lease.h"

namespace muster::proxy {

struct Options {
  bool merge = false;  ///< see Proxy
  size_t max_cached_bytes = 64 << 20;
  size_t max_cached_keys = 1 << 18;
  /// How long an arrival at a barrier waits for other arrivals of this node. At a barrier of thousands of callers the
  /// hold is longer. The hold adapts, and becomes much shorter if no other caller of this node arrives.
  Duration max_hold = std::chrono::milliseconds(1);
};

/// The part that sent a request to the server above. The request's number is serial * 4 + part.
enum class Part : uint8_t { kPassthrough = 0, kAdd = 1, kBarrier = 2, kRead = 3 };
inline Part part_of(RequestId id) { return static_cast<Part>(id & 3); }

/// Identifies a client's request by the client's own number for it.
struct Caller {
  ClientId client = 0;
  RequestId id = 0;
  friend auto operator<=>(const Caller&, const Caller&) = default;
};

struct Output {
  std::vector<Request> requests;
  Replies replies;
  RequestId last_serial = 0;

  RequestId send(Part part, Request request) {
    request.id = ++last_serial << 2 | static_cast<RequestId>(part);
    requests.push_back(std::move(request));
    return requests.back().id;
  }
  void answer(const Caller& caller, Reply reply) {
    reply.client = caller.client;
    reply.id = caller.id;
    replies.push_back(std::move(reply));
  }
  void refuse(const Caller& caller, const Error& why) { answer(caller, {.status = tl::unexpected(why)}); }
  void abort(const Caller& caller) { refuse(caller, cancelled().value()); }
};

/// Forwards requests one by one and unchanged.
class Passthrough {
 public:
  explicit Passthrough(Output& out) : out_(out) {}
  /// Returns the number of the request that goes up.
  RequestId submit(Request request, ClientId client);
  bool has(const Caller& caller) const { return sent_.contains(caller); }
  void cancel(const Caller& caller);
  void drop(ClientId client);
  void receive(Reply reply);
  void fail(const Error& why);
  size_t pending() const { return callers_.size(); }

 private:
  Output& out_;
  std::unordered_map<RequestId, Caller> callers_;
  struct Sent {
    RequestId id;   // of the request that went up
    bool answered;  // if false, the server carries it out even if its client leaves: kNoTorchReply
  };
  std::map<Caller, Sent> sent_;
};

/// Merges adds to one key. While one add is on its way, later adds are summed up and leave as the next request. Only
/// amounts of the same sign are merged. Then the partial sums only grow (or only shrink), so a merged add overflows
/// exactly if one of its parts would. If the server refuses a merged add, it has not applied it. The parts are then
/// sent one by one.
class Adds {
 public:
  explicit Adds(Output& out) : out_(out) {}
  void submit(Request request, ClientId client);
  void receive(Reply reply);
  void flush();
  void fail(const Error& why);
  size_t pending() const { return pending_; }

 private:
  struct Member {
    Caller caller;
    int64_t amount;
  };
  struct Group {
    int64_t amount = 0;
    bool closed = false;  // accepts no more members
    std::vector<Member> members{};
  };
  struct Lane {
    std::deque<Group> groups;  // the first group is on its way if `sent`
    bool sent = false;
  };

  void answer(const Group& group, const Reply& reply);

  Output& out_;
  std::unordered_map<Key, Lane> lanes_;
  std::unordered_set<Key> dirty_;  // lanes that may send
  std::unordered_map<RequestId, Key> sent_;
  size_t pending_ = 0;
};

/// Merges arrivals at barriers. Arrivals with the same key and count that come within the hold time leave as one
/// request.
///
/// If an arrival is withdrawn after its request has left, the server may have released it already. The answer to the
/// withdrawal says how many arrivals were taken back. The server released the others. Until the answer comes, releases
/// go to arrivals that are not being withdrawn.
class Barriers {
 public:
  /// With a hold time of 0 every arrival leaves at once.
  Barriers(Output& out, Duration max_hold) : out_(out), max_hold_(max_hold), hold_(max_hold) {}
  void submit(Request request, ClientId client, TimePoint now);
  /// A proxy below withdraws arrivals.
  void withdraw(const Request& request, ClientId client);
  /// False if the caller has no such request here.
  bool cancel(const Caller& caller);
  void drop(ClientId client);
  void receive(Reply reply);
  void flush(TimePoint now);
  std::optional<TimePoint> next_wake() const;
  void fail(const Error& why);
  size_t pending() const { return where_.size(); }

 private:
  struct Member {
    Caller caller;
    uint32_t weight;           // arrivals that wait
    uint32_t withdrawing = 0;  // how many of them are being withdrawn
  };
  using Members = std::vector<Member>;
  struct Group {
    Key key;
    int64_t count = 0;
    Members members{};
    uint32_t weight = 0;
    Members::iterator find(const Caller& caller) { return std::ranges::find(members, caller, &Member::caller); }
  };
  struct Held {
    Group group;
    TimePoint until;
  };
  struct Withdrawal {
    RequestId group;
    Caller caller;
    uint32_t weight;
    std::optional<RequestId> answer_to;  // the request of the proxy below; empty if a client canceled or left
  };
  // This node's part of a barrier's current round.
  struct Round {
    uint32_t arrived = 0;
    uint32_t requests = 0;
  };
  using HeldKey = std::pair<Key, int64_t>;
  using HeldGroups = std::map<HeldKey, Held>;

  HeldGroups::iterator send(HeldGroups::iterator held);
  void release(RequestId id, Group& group, uint32_t count);
  // Withdraws up to `weight` arrivals of the caller.
  void take_back(const Caller& caller, RequestId group, uint32_t weight, std::optional<RequestId> answer_to);
  void taken_back(const Withdrawal& withdrawal, uint32_t count);
  void report(const Withdrawal& withdrawal, uint32_t count);
  uint32_t take_from_held(const Caller& caller, uint32_t weight);
  Members::iterator shrink(Group& group, Members::iterator member, uint32_t weight);
  void learn(const Key& key);

  Output& out_;
  const Duration max_hold_;
  Duration hold_;
  uint32_t expected_ = UINT32_MAX;  // this node's arrivals in the latest round
  HeldGroups held_;
  std::unordered_map<RequestId, Group> sent_;
  std::map<Caller, RequestId> where_;  // the request that contains the caller; 0: the caller is held
  std::unordered_map<Key, Round> rounds_;
  std::unordered_map<RequestId, Withdrawal> withdrawals_;
};

/// Answers reads. If all keys of a request are leased, the answer comes from the cache. Otherwise a fetch, which
/// readers of the same keys share, brings the missing keys.
///
/// Why this is linearizable: a leased value cannot have changed since it was read above, so all values of an answer are
/// current when the proxy gives it. A reader that joins a fetch on its way uses the result only if the result has
/// leases. Otherwise the fetch may have been carried out before the reader's request, and the reader sends a request of
/// its own.
///
/// It is one class, because this argument is about the cache, the fetches and the readers together: a recall or a set
/// changes all three in one step.
class Reads {
 public:
  Reads(Output& out, const Options& options) : out_(out), options_(options) {}
  void submit(Request request, ClientId client, TimePoint now);
  /// False if the caller has no such request here.
  bool cancel(const Caller& caller);
  void drop(ClientId client);
  void receive(Reply reply, TimePoint now);
  /// Call this when the server above recalls the key, or when a client of this node is about to change it. Gives the
  /// key's lease back as soon as no client holds a lease of the key.
  void give_back(const Key& key);
  void give_back_all();
  /// True if the key is leased, or may be soon.
  bool holds(const Key& key) const { return cache_.contains(key) || latest_set_.contains(key); }
  /// Records a set that went up as request `set` and may bring a lease of its key. `below` is a client that wants a
  /// lease too.
  void expect(RequestId set, Key key, Bytes value, std::optional<ClientId> below);
  /// Takes the reply to a set. True if the client below gets a lease too.
  bool take_set(const Reply& reply, TimePoint now);
  void release(const Request& request, ClientId client);
  uint64_t revoke(ClientId client);
  uint64_t revocations() const { return revocations_; }
  uint64_t grants_ended() const { return grants_ended_; }
  void set_lease_end(TimePoint until, TimePoint now);
  void flush();
  void fail(const Error& why);
  size_t pending() const { return readers_.size(); }

 private:
  struct Cached {
    std::optional<Bytes> value;  // empty: the proxy knows only that the key exists
    std::list<Key>::iterator age;
  };
  struct Reader {
    Caller caller;
    Request request;
    std::set<RequestId> fetches;  // the reader waits for all of these
  };
  // A set on its way.
  struct Set {
    Key key;
    Bytes value;
    std::optional<ClientId> below;
  };
  struct Fetch {
    Request request;
    std::set<Caller> readers;
    std::set<Caller> initiators;  // readers that its reply answers completely, even without leases
    bool shared = true;           // other readers may join
    bool sent = false;
    bool stale = false;  // one of its keys was given back since, so its reply brings no leases
  };

  bool usable(const Key& key, bool with_value) const;
  bool answer_from_cache(const Reader& reader, TimePoint now);
  void grant(const Reader& reader, Reply& reply);
  void join(const Caller& caller, std::vector<Key> missing);
  std::vector<RequestId> joinable(const std::vector<Key>& keys, bool with_values) const;
  void attach(const Caller& caller, RequestId fetch);
  void read_alone(const Caller& caller);
  RequestId start(Request request, bool shared);
  void leave(const Caller& caller);
  Fetch close(RequestId id);
  void answer_initiator(const Reader& initiator, const Fetch& fetch, const Reply& reply);
  void install(const Fetch& fetch, const Reply& reply);
  void keep(const Key& key, std::optional<Bytes> value);
  void make_room();
  void uncache(const Key& key);
  void freed(const std::vector<Key>& keys);

  Output& out_;
  const Options options_;
  TimePoint lease_end_{INT64_MIN};
  std::unordered_map<Key, Cached> cache_;
  std::list<Key> lru_;  // the most recently used key first
  size_t cached_bytes_ = 0;
  std::set<Key> giving_back_;         // the next flush gives these back
  LeaseTable below_;                  // leases of clients that are proxies
  uint64_t revocations_ = 0;          // counts revocations of one client's leases or of all leases
  uint64_t grants_ended_ = 0;         // revocations_ when the leases of all clients ended
  std::unordered_set<Key> recalled_;  // keys to give back once no client has a lease of them

  std::map<RequestId, Fetch> fetches_;
  std::vector<RequestId> unsent_;
  std::unordered_map<Key, std::vector<RequestId>> fetching_;  // shared fetches of a key
  std::unordered_map<RequestId, Set> sets_;                   // unanswered sets whose keys were not changed again
  std::unordered_map<Key, RequestId> latest_set_;             // of sets_, by key
  std::map<Caller, Reader> readers_;
};

}  // namespace muster::proxy
