#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/io/fd.h"
#include "muster/io/host_identity.h"
#include "muster/io/loop.h"
#include "muster/transport/link.h"
#include "muster/transport/socket/socket_link.h"
#include "muster/transport/striped_link.h"
#include "muster/transport/transport.h"

namespace muster {

/// The links of one rank to the other ranks of its group: dials and accepts them, joins the subflows of each, monitors
/// the processes at the other ends, and closes them all with a reason. Each user that drives a loop of its own has its
/// own table: the collective engine, the P2P engine and the RPC endpoint.
///
/// Not thread-safe: used by the thread that drives the loop. The events are called on that thread.
class LinkTable {
 public:
  /// The end that opened a link.
  enum class Side : uint8_t { kDialed, kAccepted };
  /// A rank, and the address and transport of its table.
  struct Endpoint {
    std::string name;  ///< for messages: "rank 3 (host b, pid 812)"
    ProcessIdentity process;
    std::string address;
    Transport transport = Transport::kTcp;
  };
  struct Events {
    /// All subflows of a link are connected.
    std::function<void(Rank rank, Side side, Link& link)> linked;
    /// A link or a subflow of an incomplete link has ended. A rank may be reported several times.
    std::function<void(Rank rank, Side side, const Error& why)> lost;
    /// A subflow could not be connected. If the handler returns true, the table dials the subflow again soon. Without a
    /// handler, connect() returns the error.
    std::function<bool(Rank rank, const Error& why)> dial_failed;
    /// The process of the rank has died.
    std::function<void(Rank rank, const Error& why)> died;
    /// The rank has dialed again, because its link broke. The old link is destroyed after this. Without a handler, the
    /// new link is refused.
    std::function<void(Rank rank)> replaced;
  };

  /// `tcp_streams`: the number of connections in a TCP link.
  LinkTable(Loop& loop, LinkIdentity identity, int tcp_streams);
  LinkTable(const LinkTable&) = delete;
  LinkTable& operator=(const LinkTable&) = delete;

  /// Replaces the event handlers. The new handlers are called for every link that exists, including links that have
  /// ended already.
  void set_events(Events events);
  /// Accepts links from now on. Returns the address that the other ranks dial.
  Result<std::string> listen(const Address& address, Transport transport);
  /// Sets the endpoint of a rank. It must be known before the rank is dialed, and so must that of this rank before a
  /// process is monitored.
  void set_endpoint(Rank rank, Endpoint endpoint) { endpoints_[rank] = std::move(endpoint); }
  /// The endpoint of the rank, or null while it is not known.
  const Endpoint* find_endpoint(Rank rank) const;
  const Endpoint& endpoint(Rank rank) const { return endpoints_.at(rank); }

  /// Begins to dial the rank, unless a dial or a dialed link exists already.
  void dial(Rank rank, const Deadline& deadline);
  /// Waits until there is one link to each of the ranks. The table dials lower ranks and waits for higher ranks to
  /// dial. If `interrupted` returns an error, the wait ends early with this error. kTimeout and kPeerLost name the
  /// rank.
  Result<> connect(const std::vector<Rank>& ranks, const Deadline& deadline,
                   const std::function<std::optional<Error>()>& interrupted);
  /// Stops listening and cancels dials in progress. Existing links stay open.
  void stop_connecting();

  /// The link of one side, or null while there is none.
  Link* link(Rank rank, Side side) const;
  /// The link that this rank dialed, else the link that it accepted, else null.
  Link* link(Rank rank) const;
  /// Reports the rank as lost when its process on this host dies. A link alone does not show that: a child of the dead
  /// process may keep its sockets open.
  void monitor_process(Rank rank);
  /// Forgets a link that has ended, and its dials and subflows, so that the rank can be dialed or accepted again. With
  /// its last link, the rank's endpoint and monitor are forgotten, too.
  void forget(Rank rank, Side side);
  /// Closes the dialed link to the rank and cancels its dials in progress.
  void close_dialed(Rank rank, const Error& why);
  /// Closes all links with `why`, including links that are accepted later. Events are not called any more.
  void close(const Error& why);
  bool is_closed() const { return closed_.has_value(); }

 private:
  /// The link of one side between this rank and another rank.
  struct Entry {
    std::unique_ptr<Link> link;
    SubflowSet subflows;                                     ///< subflows of a link that is not complete yet
    std::vector<std::unique_ptr<Dial>> dials;                ///< dials in progress, by subflow
    std::shared_ptr<void> alive = std::make_shared<char>();  ///< timers refer to it: the rank may be forgotten
  };
  using Entries = std::unordered_map<Rank, Entry>;

  LinkIdentity identity(Transport transport, int subflow = 0) const;
  Entries& entries(Side side) { return side == Side::kDialed ? dialed_ : accepted_; }
  void dial_subflow(Rank rank, int subflow, const Deadline& deadline);
  void on_dialed(Rank rank, int subflow, const Deadline& deadline, Result<std::unique_ptr<Link>> link);
  void on_accepted(std::unique_ptr<Link> link);
  void add_subflow(Rank rank, Side side, std::unique_ptr<Link> link, const Subflow& subflow);
  void report(Rank rank, Side side, Link& link);
  void report_lost(Rank rank, Side side, const Error& why);
  Error missing(const std::vector<Rank>& ranks) const;

  Loop& loop_;
  const LinkIdentity identity_;
  const int tcp_streams_;
  std::unordered_map<Rank, Endpoint> endpoints_;
  Entries dialed_, accepted_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::unordered_map<Rank, Fd> processes_;  ///< pidfds
  Events events_;
  std::optional<Error> dial_failure_, closed_;
};

}  // namespace muster
