#pragma once

#include <array>
#include <deque>
#include <optional>
#include <string_view>

#include "muster/base/clock.h"
#include "muster/io/frame.h"

namespace muster {

/// Identifies a proxy for its lifetime. It is random, because every process that knows it may continue the session.
using SessionId = std::array<uint8_t, 16>;
SessionId fresh_session_id();

/// A proxy's hello in the handshake is this text and its session id. Then follow frames as in session.cpp.
inline constexpr std::string_view kProxyHello = "muster store tier ";
Bytes proxy_hello(const SessionId& id);
/// Returns nothing if `hello` is not a proxy's hello.
std::optional<SessionId> session_of_hello(ByteView hello);

/// The first frame on a link, from the proxy.
struct SessionOpen {
  uint64_t received = 0;  ///< the number of data frames that the proxy has received
  /// True if the server accepted this session before. A server that no longer knows it has lost its state.
  bool resumes = false;
};
/// The server's answer.
struct SessionOpened {
  uint64_t received = 0;
  bool known = true;  ///< false: the session is over, and no other frame follows
};
Bytes encode(const SessionOpen& open);
Bytes encode(const SessionOpened& opened);
/// The last frame of a proxy. The server then ends its session at once.
Bytes encode_session_close();
Result<SessionOpen> decode_session_open(const Frame& frame);
Result<SessionOpened> decode_session_opened(const Frame& frame);
bool is_session_close(const Frame& frame);

/// The largest payload of a frame on a proxy's link: one message of any size and its headers.
inline constexpr uint32_t kMaxSessionFrameBytes = (1 << 30) + (9 << 20);

/// The times in every data frame. A proxy sends the time of its clock. The server sends back the latest stamp that it
/// has received, how long leases hold from that stamp on, and how often it wants a frame from the proxy (lease.h). A
/// proxy that serves other proxies also sends the interval that it wants between two frames, so that more requests and
/// replies share a frame.
struct FrameTiming {
  int64_t stamp = 0;     ///< ns of the proxy's clock
  int64_t lease = 0;     ///< ns; 0 from a proxy
  int64_t interval = 0;  ///< ns between two frames: a maximum from the server, a minimum from a proxy
};
constexpr Duration kMaxMinInterval = std::chrono::milliseconds(50);  ///< the longest interval that a proxy can ask for

/// One end of a session. Messages go both ways in order and exactly once, even if the link breaks and is replaced. Data
/// frames are numbered and kept until the other end acknowledges them. After a reconnection the missing frames are sent
/// again. A frame that arrives twice is dropped. Knows no socket, thread or clock. Not thread-safe.
class ReliableSession {
 public:
  struct Limits {
    size_t frame_bytes = 256 << 10;  ///< a frame takes no more messages above this; one message always fits
    size_t ack_bytes = 256 << 10;    ///< unacknowledged input above which wants_ack() is true
  };
  ReliableSession() : ReliableSession(Limits()) {}
  explicit ReliableSession(Limits limits) : limits_(limits) {}

  /// Queues a message (a frame of messages.cpp).
  void put(ByteView message);
  /// Calls `edit` with each batch of messages that is not acknowledged. `edit` must not change the length.
  template <class Edit>
  void for_each_kept(Edit edit) {
    for (Batch& batch : kept_) edit(batch.messages);
  }
  /// Bytes of messages that are not acknowledged, sent or not.
  size_t unacknowledged() const { return bytes_; }

  /// Call this when there is a link. `peer_received` is the number of frames that the other end has received. kProtocol
  /// if that number is impossible. The next write() sends the missing frames.
  Result<> connect(uint64_t peer_received);
  void disconnect() { connected_ = false; }
  bool connected() const { return connected_; }
  /// Appends the frames that were not sent on this link yet, and returns their number: 0 without a link.
  size_t write(Bytes& out, const FrameTiming& timing);
  /// Appends a frame without messages. Every frame also acknowledges what was received.
  void write_keepalive(Bytes& out, const FrameTiming& timing);
  /// True if enough was received since the last frame that an acknowledgement is due.
  bool wants_ack() const { return unacked_input_ >= limits_.ack_bytes; }

  struct Received {
    FrameTiming timing;
    bool keepalive = false;
    Bytes payload;  ///< empty in a keepalive, or if the frame was received before
    /// The messages of the frame, for for_each_message().
    ByteView messages() const { return payload.empty() ? ByteView() : ByteView(payload).subspan(kHeaderBytes); }
    static constexpr size_t kHeaderBytes = 5 * sizeof(uint64_t);
  };
  /// Takes a frame from the other end. kProtocol if the frame is not allowed.
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
  uint64_t sent_ = 0;       // sequence number of the newest batch that this link has sent
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
