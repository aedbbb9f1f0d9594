#pragma once

#include <memory>
#include <optional>

#include "muster/store/state/state.h"

namespace muster {

/// cancel, release, withdraw: what makes room, and so is never refused for want of it.
bool takes_back(StoreOperation operation);

/// What a node's proxy does with the requests of its clients, between them and the server above. Knows no socket,
/// thread or clock: requests and drops go in with the time; requests for the server above and replies for the clients
/// come out. The server above answers each request once (a barrier may be answered in parts), in any order.
///
/// Without `merge` every request goes up as it is. With it:
/// - adds to a key that meet here leave as one, and each client gets the sum that it would have had in turn;
/// - arrivals at a barrier wait for each other for a moment and leave as one request of their weight;
/// - reads are answered from what the proxy holds leases of (lease.h), and readers of the same keys share one request.
///
/// Middle tiers are proxies whose clients are proxies: weights add up, and leases are passed on. Not thread-safe.
class Proxy {
 public:
  struct Options {
    bool merge = false;
    size_t max_cached_bytes = 64 << 20;
    size_t max_cached_keys = 1 << 18;
    /// How long an arrival waits for others of this node, at a barrier of thousands some times as long. Adapts itself:
    /// much less where nobody else comes.
    Duration longest_hold = std::chrono::milliseconds(1);
  };
  explicit Proxy(Options options);
  ~Proxy();
  Proxy(Proxy&&) noexcept;
  Proxy& operator=(Proxy&&) noexcept;

  void submit(Request request, ClientId client, TimePoint now);
  /// Answers a request without looking at it.
  void refuse(const Request& request, ClientId client, const Error& why);
  /// The client is gone: what it waits for is cancelled. Replies for it may still come out; nobody gets them. Leases of
  /// one that is a proxy last until revoke().
  void drop(ClientId client, TimePoint now);
  /// A reply or a recall of the server above.
  void receive(Reply reply, TimePoint now);

  /// Leases may be used before this time. If the previous such time has passed, those that were held have ended.
  void set_lease_end(TimePoint until, TimePoint now);
  /// For clients that are proxies: the client was silent for so long that its leases have ended. Returns how many
  /// revocations there have been: grants of fewer (Reply::granted) that are still on their way to it have ended, too.
  uint64_t revoke(ClientId client);
  /// Grants of fewer revocations have ended, whoever they are for: so had this proxy's own leases.
  uint64_t grants_ended() const;
  /// Gives back every lease that is held, or on its way.
  void give_back_all();

  /// What is to go up now, and what is to be delivered: to be called once all that came at the same time was put in.
  std::vector<Request> take_requests(TimePoint now);
  Replies take_replies();
  /// When take_requests() will have something although nothing came in between.
  std::optional<TimePoint> next_wake() const;

  /// The server above is lost for good: every request that is not answered gets `why`, and leases have ended.
  void fail(const Error& why);
  /// Requests that are not answered yet.
  size_t pending() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The tree of proxies: which node's server `node` connects to when each serves at most `fanout` nodes (0: no limit),
/// node 0 being the root. nodes 1..fanout hang on the root, the next fanout * fanout on those, and so on: the node's
/// depth is logarithmic. -1 for the root.
int parent_of(int node, int nodes, int fanout);

}  // namespace muster
