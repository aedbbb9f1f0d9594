#pragma once

#include <optional>

#include "muster/store/proxy/proxy_parts.h"

namespace muster {

/// cancel, release, withdraw: they free resources, so a full proxy takes them too.
bool takes_back(StoreOperation operation);

/// Stands between the clients of a node and the server above. Requests and dropped clients go in, with the time.
/// Requests for the server above and replies for the clients come out. The server above answers each request once, in
/// any order; it may answer a barrier in parts. Knows no socket, thread or clock.
///
/// Without `merge` every request goes up unchanged. With it:
/// - adds to one key that wait at the same time leave as one, and each client gets the sum that it would have had;
/// - arrivals at a barrier wait for each other for a moment and leave as one request of their weight;
/// - reads are answered from keys that the proxy holds leases of (lease.h), and readers of the same keys share a
/// request.
///
/// A middle proxy has proxies as clients: weights add up, and leases are passed on. Not thread-safe.
class Proxy {
 public:
  using Options = proxy::Options;
  explicit Proxy(Options options);
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  void submit(Request request, ClientId client, TimePoint now);
  /// Answers a request with an error.
  void refuse(const Request& request, ClientId client, const Error& why) { out_.refuse({client, request.id}, why); }
  /// The client has left: its waits are cancelled. Replies for it that still come out must be dropped. Leases of a
  /// client that is a proxy last until revoke().
  void drop(ClientId client);
  /// A reply or a recall of the server above.
  void receive(Reply reply, TimePoint now);

  /// Leases may be used before this time. If the previous end has passed, the leases that were held have ended.
  void set_lease_end(TimePoint until, TimePoint now) { reads_.set_lease_end(until, now); }
  /// The leases of this client, which is a proxy, have ended. Returns the number of revocations: leases that were
  /// granted before so many (Reply::granted), and are still on their way to the client, have ended too.
  uint64_t revoke(ClientId client) { return reads_.revoke(client); }
  /// Leases granted before so many revocations have ended for all clients, because this proxy's own had ended.
  uint64_t grants_ended() const { return reads_.grants_ended(); }
  /// Gives back every lease that is held, or on its way.
  void give_back_all() { reads_.give_back_all(); }

  /// Requests that must go up now. Call it after all input of the same moment.
  std::vector<Request> take_requests(TimePoint now);
  Replies take_replies() { return std::exchange(out_.replies, {}); }
  /// When take_requests() has something to send without further input.
  std::optional<TimePoint> next_wake() const { return barriers_.next_wake(); }

  /// The server above is lost: every request that is not answered gets `why`, and leases have ended.
  void fail(const Error& why);
  /// Requests that are not answered yet.
  size_t pending() const;

 private:
  void cancel(const proxy::Caller& caller);
  void forward(Request request, ClientId client);

  const Options options_;
  proxy::Output out_;
  proxy::Passthrough passthrough_{out_};
  proxy::Adds adds_{out_};
  proxy::Barriers barriers_;
  proxy::Reads reads_;
};

/// The tree of proxies: the node whose server `node` connects to, if each serves at most `fanout` nodes (0: no limit).
/// Node 0 is the root, nodes 1 to fanout are below it, the next fanout * fanout below those, and so on. -1 for the
/// root.
int parent_of(int node, int nodes, int fanout);

}  // namespace muster
