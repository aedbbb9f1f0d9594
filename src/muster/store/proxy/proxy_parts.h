#pragma once

// The parts of a Proxy, each a state machine of its own: what they share is where their output goes.

#include <deque>
#include <list>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "muster/store/proxy/proxy.h"
#include "muster/store/state/lease.h"

namespace muster::proxy {

/// Whose request went up under a number. The number says it: serial * 4 + part.
enum class Part : uint8_t { kPlain = 0, kAdd = 1, kBarrier = 2, kRead = 3 };
inline Part part_of(RequestId id) { return static_cast<Part>(id & 3); }

/// A client's request, by the client's own number.
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
  void refuse(const Caller& caller, const Error& why) {
    Reply reply;
    reply.status = tl::unexpected(why);
    answer(caller, std::move(reply));
  }
  void abort(const Caller& caller) {
    refuse(caller, Error{ErrorCode::kAborted, "the request was cancelled by its client", kNoRank, {}});
  }
};

/// Requests that go up one by one.
class Passthrough {
 public:
  explicit Passthrough(Output& out) : out_(out) {}
  /// Returns the number under which it goes up.
  RequestId submit(Request request, ClientId client);
  bool has(const Caller& caller) const;
  /// False if the caller has no such request here.
  bool cancel(const Caller& caller);
  void drop(ClientId client);
  void receive(Reply reply);
  void fail(const Error& why);
  size_t pending() const { return callers_.size(); }

 private:
  Output& out_;
  std::unordered_map<RequestId, Caller> callers_;
  struct Sent {
    RequestId id;   // ours
    bool answered;  // or it is carried out although its client leaves: is_answered()
  };
  std::unordered_map<ClientId, std::unordered_map<RequestId, Sent>> by_client_;  // by their number
};

/// Adds to one key: while one is on its way those that come meanwhile are summed up, and leave as the next. Only
/// amounts of the same sign are merged: then no sum on the way is beyond the last one, and what overflows alone
/// overflows merged. What is refused merged was not applied, and is tried again one by one.
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
    bool closed = false;  // takes no more members
    std::vector<Member> members;
  };
  struct Lane {
    std::deque<Group> groups;  // the first one is on its way if `sent`
    bool sent = false;
  };

  void answer(const Group& group, const Reply& reply);

  Output& out_;
  std::unordered_map<Key, Lane> lanes_;
  std::unordered_set<Key> dirty_;  // lanes that may send
  std::unordered_map<RequestId, Key> sent_;
  size_t pending_ = 0;
};

/// Arrivals at barriers. Those of the same key and count that come within the hold leave as one request.
///
/// What is taken back of a request on its way is settled by the answer to the withdrawal, which says how many arrivals
/// were taken back; the others were released before. Until then a release goes to the other arrivals.
class Barriers {
 public:
  /// A hold of 0 sends every request as it comes.
  Barriers(Output& out, Duration longest_hold) : out_(out), longest_hold_(longest_hold), hold_(longest_hold) {}
  void submit(Request request, ClientId client, TimePoint now);
  /// A proxy below takes back arrivals.
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
    uint32_t withdrawing = 0;  // of these, on their way back
  };
  struct Group {
    Key key;
    int64_t count = 0;
    std::vector<Member> members;
    uint32_t weight = 0;
  };
  struct Held {
    Group group;
    TimePoint until;
  };
  struct Withdrawal {
    RequestId group;
    Caller caller;
    uint32_t weight;
    std::optional<RequestId> answer_to;  // a proxy's number for it; none: a client cancelled, or is gone
  };
  // This node's part of a round that is under way.
  struct Round {
    uint32_t arrived = 0;
    uint32_t requests = 0;
  };
  using HeldKey = std::pair<Key, int64_t>;

  void send(Group group);
  void release(RequestId id, Group& group, uint32_t count);
  void answer(const Caller& caller, uint32_t count);
  // Takes back up to `weight` arrivals of the caller's.
  void take_back(const Caller& caller, RequestId group, uint32_t weight, std::optional<RequestId> answer_to);
  void taken_back(const Withdrawal& withdrawal, uint32_t count);
  void report(const Withdrawal& withdrawal, uint32_t count);
  uint32_t take_from_held(const Caller& caller, uint32_t weight);
  void shrink(Group& group, size_t index, uint32_t weight);
  void learn(const Key& key);

  Output& out_;
  const Duration longest_hold_;
  Duration hold_;
  uint32_t expected_ = UINT32_MAX;  // arrivals that made up the latest round of this node
  std::map<HeldKey, Held> held_;
  std::unordered_map<RequestId, Group> sent_;
  std::map<Caller, RequestId> where_;  // 0: held
  std::unordered_map<Key, Round> rounds_;
  std::unordered_map<RequestId, Withdrawal> withdrawals_;
};

/// Reads: from the leased keys where all of a request's are, else by a fetch that those who read the same keys share.
///
/// Why that is linearisable: a lease means that the value cannot have changed since it was read above, so at the
/// moment of an answer all of its values are current. A reader that comes while a fetch is on its way is answered by
/// it only if the fetch brings leases; otherwise the fetch may have been carried out before the reader came, and the
/// reader goes up on its own.
class Reads {
 public:
  Reads(Output& out, const Proxy::Options& options) : out_(out), options_(options) {}
  void submit(Request request, ClientId client, TimePoint now);
  /// False if the caller has no such request here.
  bool cancel(const Caller& caller);
  void drop(ClientId client);
  void receive(Reply reply, TimePoint now);
  /// The server above wants the key back, or a client of this node is about to change it: gives it back as soon as
  /// no client holds a lease of it.
  void give_back(const Key& key);
  void give_back_all();
  /// Where it is held, or soon may be. What is about to change is given back before the server has to ask.
  bool holds(const Key& key) const { return cache_.contains(key) || latest_set_.contains(key); }
  /// A set of this value goes up under this number, and may bring a lease; `below`: the proxy that would like one too.
  void expect(RequestId set, Key key, Bytes value, std::optional<ClientId> below);
  /// Takes the answer to a set, and says whether the proxy below that asked for it has a lease now.
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
  using ReaderId = uint64_t;
  struct Cached {
    std::optional<Bytes> value;  // none: only that the key is there
    std::list<Key>::iterator age;
  };
  struct Reader {
    Caller caller;
    Request request;
    std::set<RequestId> fetches;  // that it waits for
  };
  // A set on its way.
  struct Set {
    Key key;
    Bytes value;
    std::optional<ClientId> below;
  };
  struct Fetch {
    Request request;
    std::set<ReaderId> readers;
    std::set<ReaderId> initiators;  // of the readers: those for whom its reply is the whole answer, leased or not
    bool shared = true;             // others may join
    bool sent = false;
    bool stale = false;  // a key of it was given back meanwhile: it brings no leases
  };

  bool usable(const Key& key, bool with_value) const;
  bool answer_from_cache(const Reader& reader, TimePoint now);
  void grant(const Reader& reader, Reply& reply);
  void finish(ReaderId id);
  void join(ReaderId id, std::vector<Key> missing);
  std::vector<RequestId> joinable(const std::vector<Key>& keys, bool with_values) const;
  void attach(ReaderId id, RequestId fetch);
  void read_alone(ReaderId id);
  RequestId start(Request request, bool shared);
  void leave(ReaderId id);
  Fetch close(RequestId id);
  void answer_founder(const Reader& founder, const Fetch& fetch, const Reply& reply);
  void install(const Fetch& fetch, const Reply& reply);
  void keep(const Key& key, std::optional<Bytes> value);
  void make_room();
  void uncache(const Key& key);
  void freed(const std::vector<Key>& keys);

  Output& out_;
  const Proxy::Options options_;
  TimePoint lease_end_{INT64_MIN};
  std::unordered_map<Key, Cached> cache_;
  std::list<Key> lru_;  // the key that was used last first
  size_t cached_bytes_ = 0;
  std::set<Key> giving_back_;         // to be said with the next flush
  LeaseTable below_;                  // what clients that are proxies hold of it
  uint64_t revocations_ = 0;          // of one of them, or of all
  uint64_t grants_ended_ = 0;         // how many there had been when those of all ended
  std::unordered_set<Key> recalled_;  // to be given back once they have done so

  std::map<RequestId, Fetch> fetches_;
  std::vector<RequestId> unsent_;
  std::unordered_map<Key, std::vector<RequestId>> fetching_;  // the shared ones
  std::unordered_map<RequestId, Set> sets_;                   // whose keys did not change meanwhile
  std::unordered_map<Key, RequestId> latest_set_;             // of sets_
  std::map<ReaderId, Reader> readers_;
  std::map<Caller, ReaderId> by_caller_;
  ReaderId last_reader_ = 0;
};

}  // namespace muster::proxy
