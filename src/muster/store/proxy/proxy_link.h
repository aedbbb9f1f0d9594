#pragma once

#include <algorithm>
#include <string>

#include "muster/store/proxy/proxy.h"
#include "muster/store/session.h"
#include "muster/store/state/lease.h"

namespace muster {

/// A proxy and its session with the server above: requests of clients go in, bytes for the link come out, and the other
/// way round. What is on its way when a link breaks is sent again on the next, and done once. Knows no socket, thread
/// or clock, so that a simulator can run thousands. Not thread-safe.
///
/// On a new link (handshake done, with tier_hello(session())): send begin(); feed receive() with what comes. At the end
/// of every turn in which anything was put in, and at next_wake(): write(), and deliver take_replies().
class ProxyLink {
 public:
  struct Options {
    Proxy::Options proxy;
    std::string server;                           ///< for messages: the address of the server above
    size_t max_unacknowledged = size_t{1} << 30;  ///< bytes that wait for the link, before requests are refused
  };
  /// A sign of life is sent as often as the server wants it (lease.h), more seldom where nothing waits and nothing was
  /// asked for some time: leases then end. A link on which none came for kSilence, or two beats if that is longer, is
  /// dead.
  static constexpr Duration kIdleBeat = std::chrono::seconds(6);
  static constexpr Duration kSilence = std::chrono::seconds(14);

  /// A node whose workers ask at the same time sends no two frames within two round trips: they leave as one. Where
  /// more than kMany requests wait, as at a middle tier, the time grows with them.
  static constexpr Duration kShortestGap = std::chrono::microseconds(200);
  static constexpr Duration kLongestGap = std::chrono::milliseconds(2);
  static constexpr int64_t kMany = 64;
  static constexpr Duration kGapPerRequest = std::chrono::microseconds(10);
  static constexpr Duration kLongestGapOfMany = std::chrono::milliseconds(10);

  /// A proxy of n proxies has about n beside it (--store-fanout auto). The root then takes some n * n * kPacePerNode to
  /// carry out what all nodes ask once: no more often go frames to it, nor from it.
  static constexpr Duration kPacePerNode = std::chrono::microseconds(4);

  explicit ProxyLink(Options options, SessionId session = fresh_session_id());
  const SessionId& session() const { return id_; }

  void submit(Request request, ClientId client, TimePoint now);
  void drop(ClientId client, TimePoint now);
  /// See Proxy.
  uint64_t revoke(ClientId client) { return proxy_.revoke(client); }
  uint64_t grants_ended() const { return proxy_.grants_ended(); }
  /// So many of the clients are proxies now: it is a middle tier.
  void serves_proxies(size_t count);
  /// For how long from now clients that are proxies may use leases.
  Duration lease_left(TimePoint now) const;

  /// The first bytes on a new link.
  Bytes begin(TimePoint now);
  /// Bytes of the server. An error ends the link, and if lost() says so the session with it.
  Result<> receive(ByteView bytes, TimePoint now);
  /// The link is gone. Nothing is until give_up().
  void link_lost();
  /// Whether nothing was heard for too long: the link is to be given up.
  bool silent(TimePoint now) const;

  /// Appends what is to be sent now.
  void write(Bytes& out, TimePoint now);
  Replies take_replies() { return proxy_.take_replies(); }
  /// When write() has something although nothing came in between; nothing without a link.
  std::optional<TimePoint> next_wake() const;

  /// The session is over: everything that waits, and whatever is asked from now on, is answered with kPeerLost.
  void give_up(const std::string& why);
  const std::optional<Error>& lost() const { return lost_; }
  size_t pending() const { return proxy_.pending(); }

 private:
  void put_requests(TimePoint now);
  Duration gap() const;
  Duration pace() const { return std::min(proxies_ * proxies_ * kPacePerNode, kLongestPace); }
  TimePoint beat_due() const;
  Result<> on_frame(Frame frame, TimePoint now);
  Result<> on_opened(const Frame& frame);

  const Options options_;
  const SessionId id_;
  Proxy proxy_;
  ReliableSession session_;
  FrameParser parser_{kMaxTierFrameBytes};
  int64_t proxies_ = 0;   // below this one
  bool linked_ = false;   // there is a link
  bool resumes_ = false;  // the server has known this session
  TimePoint heard_{}, written_{}, asked_{};
  TimePoint sent_{INT64_MIN};  // the latest frame with requests
  bool gathers_ = false;       // requests wait until gap() after that
  bool timing_ = false;        // its echo will tell the round trip
  Duration round_trip_{};
  Duration beat_ = kBeat;  // as the server wants it
  TimePoint lease_end_{INT64_MIN};
  std::optional<Error> lost_;
};

}  // namespace muster
