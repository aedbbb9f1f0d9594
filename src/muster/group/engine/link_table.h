#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/io/loop.h"
#include "muster/transport/link.h"
#include "muster/transport/socket/socket_link.h"
#include "muster/transport/striped_link.h"
#include "muster/transport/transport.h"

namespace muster {

/// The links of one rank, as they come to be: of two ranks the higher dials and the lower accepts, when the group forms
/// or when a schedule first needs the link. Used by whoever drives the loop.
class LinkTable {
 public:
  /// Where a rank listens, and how it is reached.
  struct Place {
    std::string who;  ///< "rank 3 (host b, pid 812)"
    std::string address;
    Transport transport = Transport::kTcp;
  };
  /// Of each link that is made, also of those that wait for it below.
  using Handler = std::function<void(Rank rank, Link& link)>;

  /// `tcp_streams`: connections that a link over TCP is made of.
  LinkTable(Loop& loop, LinkIdentity identity, int tcp_streams);
  LinkTable(const LinkTable&) = delete;
  LinkTable& operator=(const LinkTable&) = delete;

  /// What this rank listens at; kept open until stop().
  Result<std::string> listen(const Address& address, Transport transport);
  void set_places(std::vector<Place> places) { places_ = std::move(places); }
  const std::vector<Place>& places() const { return places_; }
  void on_link(Handler handler) { handler_ = std::move(handler); }

  /// Dials those of the ranks that are below this one and not linked yet, and waits until all are linked. Ends early
  /// with `interrupted`'s error, when it has one. kTimeout, or kPeerLost for one that refuses, names the rank.
  Result<> link_with(const std::vector<Rank>& ranks, const Deadline& deadline,
                     const std::function<std::optional<Error>()>& interrupted);
  /// From now on no link is made; those that are there stay.
  void stop() {
    listeners_.clear();
    for (auto& dials : dials_) dials.clear();
  }
  /// By rank; null where there is none (yet).
  Link* link(Rank rank) const { return links_[rank].get(); }
  const std::vector<std::unique_ptr<Link>>& links() const { return links_; }

 private:
  LinkIdentity identity(Transport transport, int lane = 0) const;
  void adopt(std::unique_ptr<Link> link, const Lane& lane);
  void dial(Rank rank, const Deadline& deadline);
  Error missing(const std::vector<Rank>& ranks) const;

  Loop& loop_;
  const LinkIdentity identity_;
  const int tcp_streams_;
  std::vector<Place> places_;
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<LaneSet> lanes_;                             ///< by rank; of links that are not whole yet
  std::vector<std::vector<std::unique_ptr<Dial>>> dials_;  ///< by rank; kept until the link is there
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::optional<Error> failure_;  ///< of a dial, or of a link that is not whole yet
  Handler handler_;
};

}  // namespace muster
