#pragma once

#include "muster/store/server/expiry.h"
#include "muster/store/session.h"

namespace muster {

/// The server's end of a proxy's session. It outlives its links. While there is no link, requests go on waiting, and
/// replies are kept for the next link. Knows no socket and no thread. Not thread-safe.
class ServerSession {
 public:
  explicit ServerSession(const Clock& clock, SessionExpiry::Limits limits = {}) : expiry_(clock, limits) {}

  /// Call this when there is a link. Its first bytes are the proxy's open frame.
  void link_up();
  void link_lost();
  bool linked() const { return expiry_.linked(); }

  struct Input {
    std::vector<Request> requests;
    size_t frames = 0;
    bool closed = false;  ///< the proxy and its session have ended
  };
  /// The minimum time that the proxy wants between two frames, at most kMaxMinInterval.
  Duration min_interval() const { return min_interval_; }
  /// Takes bytes from the link. After an error the session must be ended.
  Result<Input> receive(ByteView bytes);

  void reply(const Reply& reply);
  /// Leases whose Reply::granted is below `revocations` have ended. Removes these leases from replies that wait here or
  /// come later.
  void end_grants(uint64_t revocations);
  /// Appends the frames to send now, and returns their number. See SessionExpiry::grant().
  size_t write(Bytes& out, size_t proxies = 1, Duration lease_left = Duration::max());
  /// Bytes that the proxy has not acknowledged.
  size_t unacknowledged() const { return session_.unacknowledged(); }
  /// False if the proxy expects the session of an earlier server, which is lost.
  bool known() const { return known_; }

  SessionExpiry::Expired expired(size_t proxies) const { return expiry_.expired(proxies); }
  /// For a session that is over: the time at which no proxy uses its leases any more. A proxy that has ended uses no
  /// leases, but it may have passed them on to proxies below it.
  TimePoint leases_end() const { return closed_ && !served_proxies_ ? TimePoint{INT64_MIN} : expiry_.leases_end(); }

 private:
  Result<> on_frame(Frame frame, Input& input);
  Result<> open(const Frame& frame);

  SessionExpiry expiry_;
  ReliableSession session_;
  FrameParser parser_{kMaxSessionFrameBytes};
  bool known_ = false;          // the session has been opened on a link
  bool closed_ = false;         // the proxy has ended
  bool opened_due_ = false;     // the answer to the open frame must be sent
  bool keepalive_due_ = false;  // the answer to a keepalive must be sent
  int64_t stamp_ = 0;           // the latest stamp of the proxy's clock
  Duration min_interval_{};
  uint64_t grants_ended_ = 0;
  bool served_proxies_ = false;
};

}  // namespace muster
