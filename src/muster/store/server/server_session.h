#pragma once

#include "muster/store/session.h"
#include "muster/store/state/lease.h"

namespace muster {

/// The server's end of a proxy's session. It outlives its links, as does the client that it is for the store: what
/// waits goes on waiting while the link is away, and replies are kept for the next one. Knows no socket, thread or
/// clock. Not thread-safe.
class ServerSession {
 public:
  /// A link is there; what it brings begins with the proxy's open frame.
  void link_up(TimePoint now);
  void link_lost();
  bool linked() const { return linked_; }
  /// When the proxy was last heard.
  TimePoint heard() const { return heard_; }

  struct Input {
    std::vector<Request> requests;
    size_t frames = 0;
    bool closed = false;  ///< the proxy has ended: so has the session
  };
  /// How much time the proxy wants between two frames, at most kLongestPace.
  Duration pace() const { return pace_; }
  /// Whether the proxy has ever said that it serves proxies itself: then it may have passed its leases on.
  bool served_proxies() const { return served_proxies_; }
  /// Takes bytes of the link. An error ends the session.
  Result<Input> receive(ByteView bytes, TimePoint now);

  void reply(const Reply& reply);
  /// What was granted to the proxy before so many revocations (Reply::granted) has ended: what waits here says nothing
  /// of it any more, nor does a reply that comes later.
  void end_grants(uint64_t revocations);
  /// Appends what is to be sent now; returns how many frames that are. `lease`: for how long after it was last heard
  /// the proxy may use leases; `beat`: how often it is to give a sign of life.
  size_t write(Bytes& out, Duration lease, Duration beat = kBeat);
  /// Bytes that the proxy is not known to have.
  size_t unacknowledged() const { return session_.unacknowledged(); }
  /// Whether the proxy has found here what it expects: false for a session of a server that was here before.
  bool known() const { return known_; }

 private:
  Result<> on_frame(Frame frame, Input& input);
  Result<> open(const Frame& frame);

  ReliableSession session_;
  FrameParser parser_{kMaxTierFrameBytes};
  bool linked_ = false;
  bool known_ = false;   // a link has been opened before
  bool opened_ = false;  // answer to the open frame is due
  bool beat_ = false;    // answer to a beat is due
  TimePoint heard_{};
  int64_t stamp_ = 0;
  Duration pace_{};
  uint64_t grants_ended_ = 0;
  bool served_proxies_ = false;
};

}  // namespace muster
