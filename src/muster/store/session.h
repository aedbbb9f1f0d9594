#pragma once

#include <array>
#include <deque>
#include <optional>
#include <string_view>

#include "muster/base/clock.h"
#include "muster/io/frame.h"

namespace muster {

/// Who a proxy is for as long as it lives. Chosen at random: knowing it is the right to continue its session.
using SessionId = std::array<uint8_t, 16>;
SessionId fresh_session_id();

/// What a proxy says in the handshake: this and its session. Its link speaks the frames of session.cpp.
inline constexpr std::string_view kTierHello = "muster store tier ";
Bytes tier_hello(const SessionId& id);
/// Nothing if it is something else.
std::optional<SessionId> session_of_hello(ByteView hello);

/// The first frame on a link, from the proxy.
struct SessionOpen {
  uint64_t received = 0;  ///< data frames that it has of the server
  bool resumes = false;   ///< the server answered before: one that does not know the session has lost its state
};
/// The server's answer.
struct SessionOpened {
  uint64_t received = 0;
  bool known = true;  ///< false: the session is over, nothing else follows
};
Bytes encode(const SessionOpen& open);
Bytes encode(const SessionOpened& opened);
/// The last frame, from a proxy that ends: its session need not be kept.
Bytes encode_session_close();
Result<SessionOpen> decode_session_open(const Frame& frame);
Result<SessionOpened> decode_session_opened(const Frame& frame);
bool is_session_close(const Frame& frame);

/// The greatest payload of a frame on a link between tiers: one message of any size, and what goes before it.
inline constexpr uint32_t kMaxTierFrameBytes = (1 << 30) + (9 << 20);

/// The times that go with every data frame. A proxy sends its clock; the server sends back the latest that it has
/// heard, for how long from that moment on leases hold, and how often it wants to hear from the proxy (lease.h). A
/// proxy of proxies says how much time it wants between two frames, for what comes together it can also hand on
/// together.
struct FrameTiming {
  int64_t stamp = 0;  ///< ns of the proxy's clock
  int64_t lease = 0;  ///< ns; 0 from a proxy
  int64_t beat = 0;   ///< ns: at least so often from the server, from a proxy: at most
};
constexpr Duration kLongestPace = std::chrono::milliseconds(50);  ///< the most time that a proxy can want

/// One end of a session: messages go both ways in order, each exactly once, over links that come and go. Every data
/// frame is numbered and kept until the other end has said that it has it; after a reconnection what the other end
/// does not have is sent again, and what it gets twice it drops. Knows no socket, thread or clock. Not thread-safe.
class ReliableSession {
 public:
  struct Limits {
    size_t frame_bytes = 256 << 10;  ///< a frame is begun anew over this; one message always fits
    size_t ack_bytes = 256 << 10;    ///< received without a word in return, before wants_ack()
  };
  ReliableSession() : ReliableSession(Limits()) {}
  explicit ReliableSession(Limits limits) : limits_(limits) {}

  /// Adds a message (a frame of messages.cpp) to what is to be sent.
  void put(ByteView message);
  /// Calls `edit` with the messages that the other end is not known to have. It must not change their lengths.
  template <class Edit>
  void for_each_kept(Edit edit) {
    for (Batch& batch : kept_) edit(batch.messages);
  }
  /// Bytes that the other end is not known to have, sent or not.
  size_t unacknowledged() const { return bytes_; }

  /// A link is there, and the other end has said how many frames it has: kProtocol if that cannot be. What it lacks
  /// goes with the next write().
  Result<> connect(uint64_t peer_received);
  void disconnect() { connected_ = false; }
  bool connected() const { return connected_; }
  /// Appends the frames that the other end has not been sent on this link, and returns how many; none without a link.
  size_t write(Bytes& out, const FrameTiming& pulse);
  /// Appends a frame without messages: a sign of life that acknowledges.
  void write_beat(Bytes& out, const FrameTiming& pulse);
  /// Whether so much was received that the other end should hear of it, to be able to forget it.
  bool wants_ack() const { return unacked_input_ >= limits_.ack_bytes; }

  struct Received {
    FrameTiming pulse;
    bool beat = false;
    bool fresh = false;  ///< data that was not received before
    Bytes payload;
    /// The frames of messages.cpp that came, none in a beat: see for_each_message().
    ByteView messages() const;
  };
  /// A frame of the other end. kProtocol ends the link (not the session).
  Result<Received> receive(Frame frame);
  /// Data frames received so far.
  uint64_t received() const { return received_; }

 private:
  struct Batch {
    uint64_t sequence;
    Bytes messages;
  };

  Result<> acknowledge(uint64_t sequence);
  void write_frame(Bytes& out, uint64_t sequence, ByteView messages, const FrameTiming& pulse);

  Limits limits_;
  std::deque<Batch> kept_;  // in the order of their numbers, which have no gap
  uint64_t last_ = 0;       // the number of the newest batch
  uint64_t sent_ = 0;       // the newest that was sent on this link
  size_t bytes_ = 0;
  uint64_t received_ = 0;
  size_t unacked_input_ = 0;
  bool connected_ = false;
};

/// Calls `each(header, payload)` with every frame of what came in one data frame.
template <class Each>
Result<> for_each_message(ByteView messages, Each each) {
  while (!messages.empty()) {
    MUSTER_ASSIGN(const FrameHeader header, decode_frame_header(messages, kMaxTierFrameBytes));
    messages = messages.subspan(kFrameHeaderBytes);
    if (header.length > messages.size()) return fail(ErrorCode::kProtocol, "a message between tiers is cut short");
    MUSTER_TRY(each(header, messages.first(header.length)));
    messages = messages.subspan(header.length);
  }
  return {};
}

}  // namespace muster
