#pragma once

#include "muster/store/server/expiry.h"
#include "muster/store/session.h"

namespace muster {

/// The server's end of a proxy's session. It outlives its links: while there is none, requests go on waiting, and
/// replies are kept for the next link. Knows no socket and no thread. Not thread-safe.
class ServerSession {
 public:
  explicit ServerSession(const Clock& clock, SessionExpiry::Limits limits = {}) : expiry_(clock, limits) {}

  /// There is a link. Its first bytes are the proxy's open frame.
  void link_up();
  void link_lost();
  bool linked() const { return expiry_.linked(); }

  struct Input {
    std::vector<Request> requests;
    size_t frames = 0;
    bool closed = false;  ///< the proxy has ended, and its session with it
  };
  /// The least time that the proxy wants between two frames, at most kMaxMinInterval.
  Duration min_interval() const { return min_interval_; }
  /// Takes bytes of the link. An error ends the session.
  Result<Input> receive(ByteView bytes);

  void reply(const Reply& reply);
  /// Leases granted before so many revocations (Reply::granted) have ended: replies that wait here, or come later, do
  /// not grant them any more.
  void end_grants(uint64_t revocations);
  /// Appends what is to be sent now, and returns the number of frames. See SessionExpiry::grant().
  size_t write(Bytes& out, size_t proxies = 1, Duration lease_left = Duration::max());
  /// Bytes that the proxy is not known to have.
  size_t unacknowledged() const { return session_.unacknowledged(); }
  /// False if the proxy expects the session of an earlier server, which is lost.
  bool known() const { return known_; }

  SessionExpiry::Expired expired(size_t proxies) const { return expiry_.expired(proxies); }
  /// For a session that is over: when nothing uses its leases any more. A proxy that has ended uses none, but it may
  /// have passed them on to proxies of its own.
  TimePoint leases_end() const { return closed_ && !served_proxies_ ? TimePoint{INT64_MIN} : expiry_.leases_end(); }

 private:
  Result<> on_frame(Frame frame, Input& input);
  Result<> open(const Frame& frame);

  SessionExpiry expiry_;
  ReliableSession session_;
  FrameParser parser_{kMaxSessionFrameBytes};
  bool known_ = false;          // a link has been opened before
  bool closed_ = false;         // the proxy has ended
  bool opened_due_ = false;     // the answer to the open frame
  bool keepalive_due_ = false;  // the answer to a keepalive
  int64_t stamp_ = 0;           // the latest of the proxy's clock
  Duration min_interval_{};
  uint64_t grants_ended_ = 0;
  bool served_proxies_ = false;
};

}  // namespace muster
