#pragma once

#include <algorithm>
#include <string>

#include "muster/store/proxy/proxy.h"
#include "muster/store/session.h"
#include "muster/store/state/lease.h"

namespace muster {

/// A proxy and its session with the server above: requests of clients go in and bytes for the link come out, and the
/// other way round. Requests and replies that were on their way when a link broke are sent again on the next link, and
/// are carried out once. Knows no socket, thread or clock, so a simulator can run thousands. Not thread-safe.
///
/// On a new link, after a handshake with proxy_hello(session()), send begin(), then pass all input to receive(). After
/// every turn with input, and at next_wake(), call write() and deliver take_replies().
class ProxyLink {
 public:
  struct Options {
    Proxy::Options proxy;
    std::string server;                           ///< for messages: the address of the server above
    size_t max_unacknowledged = size_t{1} << 30;  ///< bytes that wait for the link, before requests are refused
  };
  /// Keepalives are sent as often as the server wants (lease.h). An idle proxy, without requests for kIdleInterval,
  /// sends fewer, and its leases end. A link without input for kSilence is dead, or for two keepalive intervals if
  /// those are longer.
  static constexpr Duration kIdleInterval = std::chrono::seconds(6);
  static constexpr Duration kSilence = std::chrono::seconds(14);

  /// The gap between two frames with requests is two round trips, so requests that several workers send at the same
  /// time leave in one frame. If more than kManyRequests requests wait, as at a middle proxy, the gap grows with their
  /// number.
  static constexpr Duration kMinGap = std::chrono::microseconds(200);
  static constexpr Duration kMaxGap = std::chrono::milliseconds(2);
  static constexpr int64_t kManyRequests = 64;
  static constexpr Duration kGapPerRequest = std::chrono::microseconds(10);
  static constexpr Duration kMaxGapOfMany = std::chrono::milliseconds(10);

  /// If n proxies are below this one, then about n proxies are beside it (--store-fanout auto), so the tree has about
  /// n * n nodes. The root needs about kMinIntervalPerNode for one request of each node. Frames go up and down no more
  /// often than that.
  static constexpr Duration kMinIntervalPerNode = std::chrono::microseconds(4);

  explicit ProxyLink(Options options, SessionId session = fresh_session_id());
  const SessionId& session() const { return id_; }

  void submit(Request request, ClientId client, TimePoint now);
  void drop(ClientId client) { proxy_.drop(client); }
  /// See Proxy.
  uint64_t revoke(ClientId client) { return proxy_.revoke(client); }
  uint64_t grants_ended() const { return proxy_.grants_ended(); }
  /// The number of clients that are proxies.
  void serves_proxies(size_t count);
  /// How long clients that are proxies may use leases from now on.
  Duration lease_left(TimePoint now) const;

  /// The first bytes on a new link.
  Bytes begin(TimePoint now);
  /// Takes bytes of the server. An error ends the link; if lost() is set, the session too.
  Result<> receive(ByteView bytes, TimePoint now);
  /// The link is lost. The session goes on until give_up().
  void link_lost();
  /// True if the link is dead: no input came for too long.
  bool silent(TimePoint now) const;

  /// Appends the bytes to send now.
  void write(Bytes& out, TimePoint now);
  Replies take_replies() { return proxy_.take_replies(); }
  /// When write() has something to send without further input. Not set without a link.
  std::optional<TimePoint> next_wake() const;

  /// Ends the session: all waiting and later requests fail with kPeerLost.
  void give_up(const std::string& why);
  const std::optional<Error>& lost() const { return lost_; }
  size_t pending() const { return proxy_.pending(); }

 private:
  void put_requests(TimePoint now);
  Duration gap() const;
  Duration min_interval() const { return std::min(proxies_ * proxies_ * kMinIntervalPerNode, kMaxMinInterval); }
  TimePoint keepalive_due() const;
  Result<> on_frame(Frame frame, TimePoint now);
  Result<> on_opened(const Frame& frame);

  const Options options_;
  const SessionId id_;
  Proxy proxy_;
  ReliableSession session_;
  FrameParser parser_{kMaxSessionFrameBytes};
  int64_t proxies_ = 0;  // clients that are proxies
  bool linked_ = false;
  bool resumes_ = false;  // the server has known this session
  TimePoint heard_{}, written_{}, asked_{};
  TimePoint sent_{INT64_MIN};  // the latest frame with requests
  bool gathers_ = false;       // requests wait until gap() has passed since then
  bool timing_ = false;        // the echo of its stamp gives the round trip
  Duration round_trip_{};
  Duration keepalive_interval_ = kKeepaliveInterval;  // as the server wants it
  TimePoint lease_end_{INT64_MIN};
  std::optional<Error> lost_;
};

}  // namespace muster
