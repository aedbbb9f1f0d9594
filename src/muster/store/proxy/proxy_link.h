#pragma once

#include <algorithm>
#include <string>

#include "muster/store/proxy/proxy.h"
#include "muster/store/session.h"
#include "muster/store/state/lease.h"

namespace muster {

/// A proxy and its session with the server above. Turns the requests of clients into bytes for the link, and bytes from
/// the link into replies for clients. If a link breaks, requests and replies that were on their way are sent again on
/// the next link. The server carries out each request once. The class knows no socket, thread or clock, so a simulator
/// can run thousands of proxies. Not thread-safe.
///
/// On a new link, after a handshake with proxy_hello(session()), send begin(). Then pass all input to receive(). After
/// every turn with input, and at next_wake(), call write() and deliver take_replies().
///
/// Many of its fields are times: write() and next_wake() must give the same answer at any time, without timers.
class ProxyLink {
 public:
  struct Options {
    Proxy::Options proxy;
    std::string server;                           ///< for messages: the address of the server above
    size_t max_unacknowledged = size_t{1} << 30;  ///< bytes; above it, new requests are refused
  };
  /// A proxy sends keepalives as often as the server wants (lease.h). A proxy is idle if it has had no requests for
  /// kIdleInterval. An idle proxy sends fewer keepalives, so its leases end. A link is dead if it has no input for
  /// kSilence, or for two keepalive intervals of the server plus kKeepaliveInterval if that is longer.
  static constexpr Duration kIdleInterval = std::chrono::seconds(6);
  static constexpr Duration kSilence = std::chrono::seconds(14);

  /// Two frames with requests are at least two round trips apart (between kMinGap and kMaxGap), so that requests which
  /// several workers send at the same time leave in one frame. If more than kManyRequests requests wait, as at a middle
  /// proxy, the gap grows with their number.
  static constexpr Duration kMinGap = std::chrono::microseconds(200);
  static constexpr Duration kMaxGap = std::chrono::milliseconds(2);
  static constexpr int64_t kManyRequests = 64;
  static constexpr Duration kGapPerRequest = std::chrono::microseconds(10);
  static constexpr Duration kMaxGapOfMany = std::chrono::milliseconds(10);

  /// If n proxies are below this proxy, then the root has about n such proxies (--store-fanout auto), so the tree has
  /// about n * n nodes. The root needs about kMinIntervalPerNode to handle one request of one node. So the interval
  /// between two frames, up or down, is at least n * n * kMinIntervalPerNode, but at most kMaxMinInterval.
  static constexpr Duration kMinIntervalPerNode = std::chrono::microseconds(4);

  explicit ProxyLink(Options options, SessionId session = fresh_session_id());
  const SessionId& session() const { return id_; }

  void submit(Request request, ClientId client, TimePoint now);
  void drop(ClientId client) { proxy_.drop(client); }
  /// See Proxy for both functions.
  uint64_t revoke(ClientId client) { return proxy_.revoke(client); }
  uint64_t grants_ended() const { return proxy_.grants_ended(); }
  /// The number of clients that are proxies.
  void serves_proxies(size_t count);
  /// The time for which clients that are proxies may still use their leases.
  Duration lease_left(TimePoint now) const;

  /// The first bytes on a new link.
  Bytes begin(TimePoint now);
  /// Takes bytes from the server. After an error the link must be closed. If lost() is set, the session has ended too.
  Result<> receive(ByteView bytes, TimePoint now);
  /// Call this when the link is lost. The session continues on the next link, until give_up().
  void link_lost();
  /// True if the link is dead, because no input has arrived for too long.
  bool silent(TimePoint now) const;

  /// Appends the bytes to send now.
  void write(Bytes& out, TimePoint now);
  Replies take_replies() { return proxy_.take_replies(); }
  /// The time at which write() has bytes to send even without further input. Not set without a link.
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
  bool resumes_ = false;  // the server has accepted this session before
  TimePoint heard_{}, written_{}, asked_{};
  TimePoint sent_{INT64_MIN};  // the latest frame with requests
  bool gathers_ = false;       // requests wait until gap() has passed since sent_
  bool timing_ = false;        // the round trip of the frame of sent_ is being measured
  Duration round_trip_{};
  Duration keepalive_interval_ = kKeepaliveInterval;  // set by the server
  TimePoint lease_end_{INT64_MIN};
  std::optional<Error> lost_;
};

}  // namespace muster
