#pragma once

#include <array>
#include <deque>
#include <optional>
#include <string_view>

#include "muster/base/clock.h"
#include "muster/io/frame.h"

namespace muster {

/// Identifies a proxy for its lifetime. It is random, because knowing it is the right to continue the session.
using SessionId = std::array<uint8_t, 16>;
SessionId fresh_session_id();

/// A proxy's hello in the handshake is this text and its session. The frames that follow are those of session.cpp.
inline constexpr std::string_view kProxyHello = "muster store tier ";
Bytes proxy_hello(const SessionId& id);
/// Nothing if it is not a proxy's hello.
std::optional<SessionId> session_of_hello(ByteView hello);

/// The first frame on a link, from the proxy.
struct SessionOpen {
  uint64_t received = 0;  ///< data frames that it has received from the server
  bool resumes = false;   ///< the server knew the session before; if it does not now, it has lost its state
};
/// The server's answer.
struct SessionOpened {
  uint64_t received = 0;
  bool known = true;  ///< false: the session is over, nothing else follows
};
Bytes encode(const SessionOpen& open);
Bytes encode(const SessionOpened& opened);
/// The last frame of a proxy that ends. The server then forgets its session at once.
Bytes encode_session_close();
Result<SessionOpen> decode_session_open(const Frame& frame);
Result<SessionOpened> decode_session_opened(const Frame& frame);
bool is_session_close(const Frame& frame);

/// The largest payload of a frame on a proxy's link: one message of any size and its headers.
inline constexpr uint32_t kMaxSessionFrameBytes = (1 << 30) + (9 << 20);

/// The times in every data frame. A proxy sends its clock. The server sends back the latest value that it has received,
/// how long leases hold from that moment on, and how often it wants a frame from the proxy (lease.h). A proxy of
/// proxies says how much time it wants between two frames, so that more requests and replies share one.
struct FrameTiming {
  int64_t stamp = 0;     ///< ns of the proxy's clock
  int64_t lease = 0;     ///< ns; 0 from a proxy
  int64_t interval = 0;  ///< ns between two frames: the most from the server, the least from a proxy
};
constexpr Duration kMaxMinInterval = std::chrono::milliseconds(50);  ///< the most that a proxy can ask for

/// One end of a session. Messages go both ways in order, each exactly once, over links that break and are made again.
/// Data frames are numbered and kept until the other end acknowledges them. After a reconnection the missing ones are
/// sent again; a frame that arrives twice is dropped. Knows no socket, thread or clock. Not thread-safe.
class ReliableSession {
 public:
  struct Limits {
    size_t frame_bytes = 256 << 10;  ///< a larger frame is split; one message always fits
    size_t ack_bytes = 256 << 10;    ///< received and not acknowledged, before wants_ack()
  };
  ReliableSession() : ReliableSession(Limits()) {}
  explicit ReliableSession(Limits limits) : limits_(limits) {}

  /// Queues a message (a frame of messages.cpp).
  void put(ByteView message);
  /// Calls `edit` with the messages that are not acknowledged. It must not change their lengths.
  template <class Edit>
  void for_each_kept(Edit edit) {
    for (Batch& batch : kept_) edit(batch.messages);
  }
  /// Bytes of messages that are not acknowledged, sent or not.
  size_t unacknowledged() const { return bytes_; }

  /// There is a link, and the other end has received so many frames. kProtocol if that is impossible. The next write()
  /// sends what it lacks.
  Result<> connect(uint64_t peer_received);
  void disconnect() { connected_ = false; }
  bool connected() const { return connected_; }
  /// Appends the frames that were not sent on this link yet, and returns their number: 0 without a link.
  size_t write(Bytes& out, const FrameTiming& timing);
  /// Appends a frame without messages, which also acknowledges.
  void write_keepalive(Bytes& out, const FrameTiming& timing);
  /// True if so much was received that an acknowledgement is due.
  bool wants_ack() const { return unacked_input_ >= limits_.ack_bytes; }

  struct Received {
    FrameTiming timing;
    bool keepalive = false;
    bool fresh = false;  ///< data that was not received before
    Bytes payload;
    /// The frames of messages.cpp, none in a keepalive: see for_each_message().
    ByteView messages() const;
  };
  /// Takes a frame of the other end. kProtocol ends the link, not the session.
  Result<Received> receive(Frame frame);
  /// Data frames received so far.
  uint64_t received() const { return received_; }

 private:
  struct Batch {
    uint64_t sequence;
    Bytes messages;
  };

  Result<> acknowledge(uint64_t sequence);
  void write_frame(Bytes& out, uint64_t sequence, ByteView messages, const FrameTiming& timing);

  Limits limits_;
  std::deque<Batch> kept_;  // in the order of their sequence numbers, without a gap
  uint64_t last_ = 0;       // sequence number of the newest batch
  uint64_t sent_ = 0;       // of the newest that was sent on this link
  size_t bytes_ = 0;
  uint64_t received_ = 0;
  size_t unacked_input_ = 0;
  bool connected_ = false;
};

/// Calls `each(header, payload)` with every message of a data frame.
template <class Each>
Result<> for_each_message(ByteView messages, Each each) {
  while (!messages.empty()) {
    MUSTER_ASSIGN(const FrameHeader header, decode_frame_header(messages, kMaxSessionFrameBytes));
    messages = messages.subspan(kFrameHeaderBytes);
    if (header.length > messages.size()) return fail(ErrorCode::kProtocol, "a message on a proxy's link is cut short");
    MUSTER_TRY(each(header, messages.first(header.length)));
    messages = messages.subspan(header.length);
  }
  return {};
}

}  // namespace muster
