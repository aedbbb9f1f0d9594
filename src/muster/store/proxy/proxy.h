#pragma once

#include <optional>

#include "muster/store/proxy/proxy_parts.h"

namespace muster {

/// A state machine between the clients of a node and the server above. Its input is the requests of clients, the
/// clients that leave, the replies of the server above, and the time. Its output is requests for the server above and
/// replies for the clients. The server above answers each request once, in any order. It may answer a barrier in parts.
/// The class knows no socket, thread or clock.
///
/// Without `merge` every request goes up unchanged. With `merge`:
/// - adds to one key that wait at the same time leave as one add. Each client gets the sum that its own add would have
/// returned.
/// - arrivals at a barrier are held for a moment (Options::max_hold) and leave as one request with their total weight.
/// - reads are answered from keys whose leases the proxy holds (lease.h). Other readers of the same keys share a
/// request.
///
/// A middle proxy has proxies as clients. It adds up their weights and passes leases on to them. Not thread-safe.
class Proxy {
 public:
  using Options = proxy::Options;
  explicit Proxy(Options options);
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  void submit(Request request, ClientId client, TimePoint now);
  /// Answers a request with an error.
  void refuse(const Request& request, ClientId client, const Error& why) { out_.refuse({client, request.id}, why); }
  /// Call this when a client has left. Cancels the client's waits. The caller must drop replies for this client that
  /// still come out. The leases of a client that is a proxy last until revoke().
  void drop(ClientId client);
  /// Takes a reply or a recall from the server above.
  void receive(Reply reply, TimePoint now);

  /// Leases may be used until this time. If the previous end has passed, all leases that were held have ended.
  void set_lease_end(TimePoint until, TimePoint now) { reads_.set_lease_end(until, now); }
  /// Ends the leases of this client, which is a proxy. Returns the number of revocations. A lease that is still on its
  /// way to the client has ended too if its Reply::granted is below this number.
  uint64_t revoke(ClientId client) { return reads_.revoke(client); }
  /// Leases whose Reply::granted is below this number have ended for all clients, because this proxy's own leases had
  /// ended.
  uint64_t grants_ended() const { return reads_.grants_ended(); }
  /// Gives back every lease that is held or on its way.
  void give_back_all() { reads_.give_back_all(); }

  /// Returns the requests that must go up now. Call this after all input of one turn of the loop.
  std::vector<Request> take_requests(TimePoint now);
  Replies take_replies() { return std::exchange(out_.replies, {}); }
  /// The time at which take_requests() has requests to send even without further input.
  std::optional<TimePoint> next_wake() const { return barriers_.next_wake(); }

  /// Call this when the server above is lost. Every unanswered request fails with `why`, and all leases end.
  void fail(const Error& why);
  /// The number of requests that are not answered yet.
  size_t pending() const;

 private:
  void forward(Request request, ClientId client);

  const Options options_;
  proxy::Output out_;
  proxy::Passthrough passthrough_{out_};
  proxy::Adds adds_{out_};
  proxy::Barriers barriers_;
  proxy::Reads reads_;
};

/// The parent of `node` in the tree of proxies: the node whose server it connects to. Each node serves at most `fanout`
/// nodes (below 1: node 0 serves all). Node 0 is the root. Nodes 1 to fanout are below it, the next fanout * fanout
/// nodes are below those, and so on. Returns -1 for the root and for a node that is out of range.
int parent_of(int node, int nodes, int fanout);

}  // namespace muster
